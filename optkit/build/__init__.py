"""The ``build`` stage; calling this package calls :func:`optkit.build.run.build`."""

from optkit._callable import make_callable

make_callable(__name__, "build")
