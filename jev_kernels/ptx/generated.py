"""Functions made from text: where register tuples need constant indices or intrinsics differ in their parameters, the
source is generated. ``inspect.getsource`` shows it and tracebacks quote it, as if it stood in a file:

    print(inspect.getsource(store))                    # of an intrinsic or a device function: made from it, see ``source``
"""
from __future__ import annotations

import itertools
import linecache

_numbers = itertools.count()


def function(text: str, **scope):
    """The function that ``text`` defines, with ``scope`` as its globals."""
    name = text[len("def "):text.index("(")]
    file = f"<generated {next(_numbers)}: {name}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    exec(compile(text, file, "exec"), scope)
    return scope[name]


def source(made) -> str:
    """The text of a generated function, or of the intrinsic or device function that was made from one."""
    for attribute in ("py_func", "_defn", "fn", "__wrapped__"):
        made = getattr(made, attribute, made)
    return "".join(linecache.getlines(made.__code__.co_filename))
