"""``python -m optkit`` is the ``optkit`` command."""

from optkit.cli import main

if __name__ == "__main__":
    main()
