"""Recipes: what is read, what is refused, and with which words."""

from pathlib import Path

import pytest
import yaml

from optkit.errors import RecipeError, UsageError
from optkit.recipe import Recipe, load_recipe, parse_section

SHIPPED = sorted((Path(__file__).parent.parent / "recipes").glob("*/*.yaml"))


def written(tmp_path, text):
    path = tmp_path / "family" / "w4a16-ort.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_there_are_recipes_to_test():
    assert len(SHIPPED) >= 3


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_every_shipped_recipe_is_valid_and_named_after_its_place(path):
    recipe = load_recipe(path)
    assert recipe.name == f"{path.parent.name}-{path.stem}"
    assert recipe.validate is not None


def test_a_model_path_is_taken_relative_to_the_recipe_and_a_hub_id_is_left_alone(tmp_path):
    (tmp_path / "model").mkdir()
    assert load_recipe(written(tmp_path, "model: ../model")).model == str((tmp_path / "model").resolve())
    assert load_recipe(written(tmp_path, "model: org/name")).model == "org/name"


def test_sections_that_are_left_out_have_their_defaults(tmp_path):
    recipe = load_recipe(written(tmp_path, "model: m"))
    assert recipe.quantize is None
    assert recipe.export.target == "ort"
    assert recipe.validate is not None
    assert recipe.bench is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: m\nquantise: {}", r"unknown key 'quantise' \(did you mean 'quantize'\?\)"),
        ("model: m\nquantize: {grup_size: 32}", r"unknown key 'quantize.grup_size' \(did you mean 'group_size'\?\)"),
        ("model: m\nvalidate: {limits: {kl_men: 1}}", r"unknown key 'validate.limits.kl_men' \(did you mean 'kl_mean'\?\)"),
        ("model: m\nquantize: {scheme: w4a17}", r"scheme 'w4a17' is not known \(did you mean 'w4a16'\?\)"),
        ("model: m\nquantize: {method: gtpq}", r"quantize.method 'gtpq' is not known \(did you mean 'gptq'\?\)"),
        ("model: m\nexport: {target: trt}", "export.target 'trt' is not known"),
        ("model: m\nexport: {max_seq_len: many}", "export.max_seq_len: int is expected, not 'many'"),
        ("model: m\nexport: {max_seq_len: 0}", "max_seq_len 0: at least 1"),
        ("model: m\nquantize: {symmetric: 1}", "quantize.symmetric: bool is expected, not 1"),
        ("model: m\nbench: {rounds: true}", "bench.rounds: int is expected, not True"),
        ("model: m\nquantize: [1]", "quantize: a mapping is expected"),
        ("export: {}", "the key 'model' is missing"),
        ("- a\n- b", "a recipe is a mapping with the keys model, name, quantize"),
        ("model: [", "not valid YAML"),
    ],
)
def test_what_is_wrong_is_named_with_file_key_and_the_nearest_known_word(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_recipe_is_a_recipe_error(tmp_path):
    with pytest.raises(RecipeError, match=r"none\.yaml: No such file"):
        load_recipe(tmp_path / "none.yaml")


def test_a_group_size_outside_the_grid_is_refused_at_birth(tmp_path):
    with pytest.raises(UsageError, match="group_size 48: use one of 16, 32, 64, 128, 256, or channel"):
        load_recipe(written(tmp_path, "model: m\nquantize: {group_size: 48}"))


def test_numbers_written_as_yaml_1_1_text_are_numbers(tmp_path):
    recipe = load_recipe(written(tmp_path, "model: m\nvalidate: {limits: {logit_error: 1e-5, kl_mean: 1}}"))
    assert recipe.validate.limits.logit_error == 1e-5
    assert recipe.validate.limits.kl_mean == 1.0


def test_channel_is_a_group_size_and_means_one_scale_per_output(tmp_path):
    recipe = load_recipe(written(tmp_path, "model: m\nquantize: {scheme: w8a16, group_size: channel}"))
    assert recipe.quantize.weights().group_size is None


def test_the_resolved_recipe_reads_back_as_itself(tmp_path):
    recipe = load_recipe(written(tmp_path, "model: m\nquantize: {ignore: [lm_head]}\nbench: {}\nsample: {prompt: hi}"))
    data = yaml.safe_load(yaml.safe_dump(yaml.safe_load(yaml.safe_dump(_lists(recipe.to_dict())))))
    assert parse_section(Recipe, data) == recipe


def _lists(data):
    """Tuples as lists, which is what YAML has."""
    if isinstance(data, dict):
        return {key: _lists(value) for key, value in data.items()}
    return [_lists(v) for v in data] if isinstance(data, (list, tuple)) else data
