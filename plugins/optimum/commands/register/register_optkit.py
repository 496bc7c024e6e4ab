"""``optimum-cli export optkit``: optkit's quantize and export behind Optimum's command line.

Optimum (2.x) looks for files in the namespace package ``optimum.commands.register`` and adds the commands they list. Everything
heavy is imported when the command runs, so ``optimum-cli --help`` stays as quick as it was.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo  # noqa: TID253  the plugin's host
from optimum.commands.export.base import ExportCommand  # noqa: TID253


class OptkitExportCommand(BaseOptimumCLICommand):
    """``optimum-cli export optkit -m MODEL [--scheme w4a16] [--target ort] OUTPUT``."""

    COMMAND = CommandInfo(name="optkit", help="Quantize and export a decoder-only model with optkit.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        required = parser.add_argument_group("Required arguments")
        required.add_argument("-m", "--model", required=True, help="HF directory, hub id or GGUF file.")
        required.add_argument("output", help="Directory to write the artifact to.")
        optional = parser.add_argument_group("Optional arguments")
        optional.add_argument("--scheme", help="Quantize first: w4a16 (int4), w8a16 (int8) or w8a8.")
        optional.add_argument("--group-size", help="Inputs that share a scale, or channel.")
        optional.add_argument("--asymmetric", action="store_true", help="Zero points instead of symmetric weights.")
        optional.add_argument("--method", default="rtn", help="Quantization method: rtn, gptq, awq, awq+gptq, ...")
        optional.add_argument("--target", default="ort", help="ort, onnx or tensorrt.")
        optional.add_argument("--dtype", default="fp32", help="fp32, fp16 or bf16.")
        optional.add_argument("--max-seq-len", type=int, help="Positions the artifact supports.")

    def run(self) -> None:
        import tempfile
        from pathlib import Path

        import optkit
        from optkit.errors import OptkitError

        args = self.args
        assert args is not None
        try:
            with tempfile.TemporaryDirectory() as work:
                source = args.model
                if args.scheme:
                    section = {"scheme": args.scheme, "method": args.method, "symmetric": not args.asymmetric}
                    if args.group_size:
                        section["group_size"] = int(args.group_size) if args.group_size.isdigit() else args.group_size
                    source = optkit.quantize(source, section, Path(work) / "quantized")
                section = {"target": args.target, "dtype": args.dtype, "max_seq_len": args.max_seq_len}
                optkit.export(source, section, args.output)
        except OptkitError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(error.exit_code)
        print(f"wrote {args.output}")


REGISTER_COMMANDS = [(OptkitExportCommand, ExportCommand)]
