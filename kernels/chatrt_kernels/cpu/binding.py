"""The compiled kernels, loaded; and the threads that run them.

Knows: the C functions of `source/api.cpp`.
Does not know: tensors, models, where the file came from.
Invariant: a library whose structs have other sizes than Python's is refused, not called.
Cost: a call through ctypes takes 1 to 2 µs and gives the interpreter's lock up while it runs.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

from chatrt_kernels.cpu.structs import STRUCTS, CallStruct, StepStruct

if TYPE_CHECKING:
    from pathlib import Path

_POINTER = ctypes.c_void_p
_INT32 = ctypes.c_int32
_INT64 = ctypes.c_int64
# name: what it returns, what it takes
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "chatrt_path": (ctypes.c_char_p, ()),
    "chatrt_struct_sizes": (ctypes.POINTER(_INT32), (ctypes.POINTER(_INT32),)),
    "chatrt_create_pool": (_POINTER, (_INT32,)),
    "chatrt_destroy_pool": (None, (_POINTER,)),
    "chatrt_weight_bytes": (_INT64, (_INT32, _INT32, _INT32)),
    "chatrt_repack": (None, (_POINTER, _INT32, _POINTER, _POINTER, _INT32, _INT32, _POINTER)),
    "chatrt_advise_large_pages": (None, (_POINTER, _INT64)),
    "chatrt_create_program": (_POINTER, (ctypes.POINTER(CallStruct), _INT32)),
    "chatrt_destroy_program": (None, (_POINTER,)),
    "chatrt_run": (_INT32, (_POINTER, _POINTER, ctypes.POINTER(StepStruct), _POINTER)),
    "chatrt_run_chains": (_INT32, (_POINTER, _POINTER, _INT32)),
    "chatrt_read": (_INT64, (_POINTER, _POINTER, _INT64)),
}


class NativeLibrary:
    """One compiled library.

    Raises:
        OSError: The file is damaged, or made for another machine or another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.functions = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            try:
                function = getattr(self.functions, name)
            except AttributeError as error:
                raise OSError(f"{path} has no function {name}") from error
            function.restype, function.argtypes = result, arguments
        count = _INT32()
        sizes = self.functions.chatrt_struct_sizes(ctypes.byref(count))
        expected = [ctypes.sizeof(struct) for struct in STRUCTS]
        if sizes[: count.value] != expected:
            raise OSError(f"{path} has structs of {sizes[: count.value]} bytes, not {expected}")

    @property
    def instruction_path(self) -> str:
        """The instructions it was compiled for: avx512-vnni, avx2, neon-dotprod or portable."""
        name: bytes = self.functions.chatrt_path()
        return name.decode()


class ThreadPool:
    """Threads that compute together; the caller of a program is one of them.

    Raises:
        OSError: The system gives no more threads.
    """

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        self.kernels = library
        self.num_threads = num_threads
        self.handle: int | None = library.functions.chatrt_create_pool(num_threads)
        if self.handle is None:
            raise OSError(f"the system does not give {num_threads} threads")
        ended = weakref.finalize(self, library.functions.chatrt_destroy_pool, self.handle)
        ended.atexit = False  # a thread may still compute; the process's end takes all of them
