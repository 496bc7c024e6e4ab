"""The ``quantize`` stage; calling this package calls :func:`optkit.quantize.run.quantize`."""

from optkit._callable import make_callable

make_callable(__name__, "quantize")
