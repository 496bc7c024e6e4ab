"""The ``validate`` stage; calling this package calls :func:`optkit.validate.run.validate`."""

from optkit._callable import make_callable

make_callable(__name__, "validate")
