"""The ``export`` stage; calling this package calls :func:`optkit.export.run.export`."""

from optkit._callable import make_callable

make_callable(__name__, "export")
