"""Tensors and their bits: what a leaf is, how its bits are copied out, and how it comes back.

torch is optional and never imported here before a stored leaf needs it: a tensor can only exist where
torch has been imported already.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fastcheck_dask.errors import (
    ConfigError,
    CorruptDataError,
    LayoutError,
    UnknownFormatError,
    UnsupportedLeafError,
)
from fastcheck_dask.layout.dtypes import TORCH_ONLY, is_plain, itemsize_of, numpy_dtype

Bits = npt.NDArray[np.uint8]

#: The kinds of array leaf, and the library that each belongs to.
LIBRARY = {
    "tensor": "torch",
    "parameter": "torch",
    "buffer": "torch",
    "unsaved_buffer": "torch",
    "ndarray": "numpy",
}
#: Steps after which two views of unusual strides count as overlapping.
_OVERLAP_WORK = 100_000
_PLAIN_TENSOR_ADVICE = "save a plain tensor or torch.nn.Parameter instead"


@dataclass(frozen=True, slots=True)
class Form:
    """How an array leaf comes back, apart from its bits."""

    #: A key of `LIBRARY`.
    kind: str
    requires_grad: bool = False
    #: The whole shape of a view that repeats its elements (strides of 0); None for all others.
    expand: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Leaf:
    """What is known of a tensor or array before its bits are copied."""

    form: Form
    #: True dtype: ``"bfloat16"``, or numpy's own spelling where zarr has none (``">f4"``, ``"<M8[ns]"``).
    dtype: str
    #: Shape of what is stored: axes along which a view repeats its elements have length 1.
    shape: tuple[int, ...]
    #: Equal for two leaves exactly when they are the same view of the same memory.
    identity: Hashable

    @property
    def nbytes(self) -> int:
        """Bytes that `copy_bits` writes."""
        return math.prod(self.shape) * itemsize_of(self.dtype)


def loaded_torch() -> Any:
    """Return torch if this process has imported it, else None."""
    torch = sys.modules.get("torch")
    # While another thread is importing torch, the module is there but still empty.
    return torch if hasattr(torch, "Tensor") and hasattr(torch, "nn") else None


def require_torch() -> Any:
    """Import torch, for a stored leaf that needs it.

    Raises
    ------
    ConfigError
        If it cannot be imported.
    """
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise ConfigError(
            f"this checkpoint holds torch tensors and torch cannot be imported ({error}); "
            "install it with: pip install 'fastcheck-dask[torch]'"
        ) from error


def describe(source: Any, path: str) -> Leaf:
    """Say how a tensor or array is stored, without looking at its values.

    Parameters
    ----------
    source : torch.Tensor or ndarray
        Any strides, any device.
    path : str
        Where it stands in the state, for the message of an error.

    Returns
    -------
    Leaf

    Raises
    ------
    UnsupportedLeafError
        If it could not come back exactly: subclasses other than `torch.nn.Parameter`; sparse, nested, meta
        and quantized tensors; arrays of objects or records.
    """
    if type(source) is np.ndarray:
        return _describe_array(source, path)
    torch = loaded_torch()
    if torch is not None and isinstance(source, torch.Tensor):
        return _describe_tensor(source, path, torch)
    if isinstance(source, np.ndarray):
        raise UnsupportedLeafError(
            path, f"a {_type_name(source)}", "save numpy.asarray(x), and a mask under a name of its own"
        )
    raise UnsupportedLeafError(path, f"a {_type_name(source)}", "it is neither a tensor nor an array")


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def numpy_name(dtype: np.dtype[Any]) -> str | None:
    """Return the name by which a numpy dtype is stored; None if it could not come back as it is."""
    if dtype.hasobject or dtype.names is not None or dtype.itemsize == 0 or dtype.metadata is not None:
        return None
    name = dtype.name if dtype.isnative and is_plain(dtype.name) else dtype.str
    # Dtypes that extensions register (ml_dtypes.bfloat16) look like plain bytes and would come back as such.
    return name if np.dtype(name) == dtype else None


def _stored_shape(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the part of a view that is not repeated."""
    if 0 in strides and 0 not in shape:
        return tuple(1 if step == 0 else length for length, step in zip(shape, strides, strict=True))
    return shape


def _describe_array(source: npt.NDArray[Any], path: str) -> Leaf:
    name = numpy_name(source.dtype)
    if name is None:
        raise UnsupportedLeafError(
            path,
            f"a numpy array of dtype {source.dtype!r}",
            "only plain elements of fixed size are stored; save each field as an array, or a list",
        )
    shape, strides = source.shape, source.strides
    stored = _stored_shape(shape, strides)
    place: Hashable = source.__array_interface__["data"][0] if source.size else ("empty", id(source))
    form = Form("ndarray", expand=None if stored == shape else shape)
    return Leaf(form, name, stored, ("numpy", place, name, shape, strides))


@lru_cache(maxsize=256)
def _torch_name(dtype: object) -> str | None:
    name = str(dtype).removeprefix("torch.")
    return name if name in TORCH_ONLY or is_plain(name) else None


def _describe_tensor(source: Any, path: str, torch: Any) -> Leaf:
    kind = _tensor_kind(source, path, torch)
    refused = _refusal(source, torch)
    name = None if refused else _torch_name(source.dtype)
    if name is None:
        got, advice = refused or (f"a tensor of dtype {source.dtype}", "convert it to a dtype of whole bytes")
        raise UnsupportedLeafError(path, got, advice)
    shape, strides = tuple(source.shape), source.stride()
    stored = _stored_shape(shape, strides)
    place: Hashable = ("empty", id(source))
    if 0 not in shape:
        place = source.data_ptr()
        if place == 0:
            raise UnsupportedLeafError(
                path, "a tensor whose storage was freed", "gather the parameters (unshard) before the save"
            )
    form = Form(kind, source.requires_grad, None if stored == shape else shape)
    identity = ("torch", place, name, shape, strides, source.device, source.is_conj(), source.is_neg())
    return Leaf(form, name, stored, identity)


def _tensor_kind(source: Any, path: str, torch: Any) -> str:
    if type(source) is torch.Tensor:
        # torch.nn.Buffer makes plain tensors that carry two attributes.
        if not getattr(source, "_is_buffer", False):
            return "tensor"
        return "buffer" if getattr(source, "persistent", True) else "unsaved_buffer"
    if type(source) is torch.nn.Parameter:
        return "parameter"
    advice = f"it is a subclass of torch.Tensor; {_PLAIN_TENSOR_ADVICE}"
    if type(source).__name__ == "DTensor":
        advice = (
            "save x.full_tensor() or x.to_local(), or use the integration with torch.distributed.checkpoint"
        )
    raise UnsupportedLeafError(path, f"a {_type_name(source)}", advice)


def _refusal(source: Any, torch: Any) -> tuple[str, str] | None:
    """Return what a tensor is and what to do, if it is more than strided elements in memory."""
    if source.layout is not torch.strided:
        return f"a tensor of layout {source.layout}", "save its indices and values, or x.to_dense()"
    if source.is_quantized:
        return (
            "a quantized tensor",
            "save x.int_repr(), its scale and its zero point under names of their own",
        )
    if source.is_nested:
        return "a nested tensor", "save its values and offsets, or a list of tensors"
    if source.is_meta:
        return "a meta tensor, which has no data", "materialize the model before the save"
    return None


def copy_bits(source: Any, out: Bits) -> None:
    """Write the logical elements of a leaf, in C order, bit for bit.

    Parameters
    ----------
    source : torch.Tensor or ndarray
        A leaf that `describe` accepts; any strides, any device. Nothing of it is kept.
    out : ndarray of uint8, shape (nbytes,)
        Writable and contiguous, as long as the stored shape needs. May not share memory with `source`.

    Raises
    ------
    LayoutError
        If `out` has another length.

    Notes
    -----
    Reads n bytes and writes n bytes; no temporary grows with the tensor (on the host).
    """
    if isinstance(source, np.ndarray):
        _copy_array(source, out)
    else:
        _copy_tensor(source, out, loaded_torch())


def _first_of_repeated(source: Any, strides: tuple[int, ...]) -> Any:
    """Return the part of a view that is not repeated."""
    if 0 in strides and 0 not in source.shape:
        return source[tuple(slice(0, 1) if step == 0 else slice(None) for step in strides)]
    return source


def _check_length(wanted: int, out: Bits) -> None:
    if wanted != out.size:
        raise LayoutError(f"a leaf of {wanted} bytes was given room for {out.size}; did it change its shape?")


def _copy_array(source: npt.NDArray[Any], out: Bits) -> None:
    source = _first_of_repeated(source, source.strides)
    _check_length(source.nbytes, out)
    if source.flags.c_contiguous:
        np.copyto(out, source.reshape(-1).view(np.uint8))
        return
    source = _bare(source)
    np.copyto(out.view(source.dtype).reshape(source.shape), source)


def _copy_tensor(source: Any, out: Bits, torch: Any) -> None:
    source = _first_of_repeated(source.detach(), source.stride())
    _check_length(source.numel() * source.element_size(), out)
    resolved = not (source.is_conj() or source.is_neg())
    if resolved and source.is_cpu and source.is_contiguous():
        # The width changes in numpy: torch refuses it for some tensors of one element or none.
        np.copyto(out, _as_integers(source, torch).numpy().reshape(-1).view(np.uint8))
        return
    if out.size == 0:
        return
    target = _tensor_over(out, source.dtype, tuple(source.shape))
    if resolved:
        target, source = _as_integers(target, torch), _as_integers(source, torch)
    # For a lazily conjugated or negated tensor the copy itself resolves it.
    target.copy_(source)


def _tensor_over(bits: Bits, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Return a tensor that shares memory with `bits`."""
    whole = bits.view(f"c{dtype.itemsize}" if dtype.itemsize == 16 else f"i{dtype.itemsize}").reshape(shape)
    return sys.modules["torch"].from_numpy(whole).view(dtype)


def _as_integers(tensor: Any, torch: Any) -> Any:
    """Return a view through whole numbers of the same width, any strides."""
    width = tensor.element_size()
    if width == 16:
        tensor, width = torch.view_as_real(tensor), 8
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width])


def is_writable(target: Any) -> bool:
    """Say whether the elements of a leaf can be changed."""
    return not isinstance(target, np.ndarray) or target.flags.writeable or not target.size


def writable_bits(target: Any) -> Bits | None:
    """Return the memory of a leaf, in C order; None if it is not one piece, or not on the host.

    Returns
    -------
    ndarray of uint8, shape (nbytes,), or None
        Writing to it changes the leaf.
    """
    if isinstance(target, np.ndarray):
        return target.reshape(-1).view(np.uint8) if target.flags.c_contiguous and target.size else None
    plain = target.is_cpu and target.is_contiguous() and not (target.is_conj() or target.is_neg())
    if not plain or target.numel() == 0:
        return None
    bits: Bits = _as_integers(target.detach(), loaded_torch()).numpy().reshape(-1).view(np.uint8)
    return bits


def put_bits(target: Any, index: tuple[slice, ...], bits: Bits) -> None:
    """Write a part of a leaf, bit for bit.

    Parameters
    ----------
    target : torch.Tensor or ndarray
        A leaf that `describe` accepts and `is_writable`; any strides, any device.
    index : tuple of slice
        The part of what is stored of it; ``()`` is all.
    bits : ndarray of uint8
        Its elements in C order. Nothing of it is kept.
    """
    if not bits.size:
        return
    if isinstance(target, np.ndarray):
        part = _bare(_first_of_repeated(target, target.strides)[(*index, ...)])
        np.copyto(part, bits.view(part.dtype).reshape(part.shape))
        return
    torch = loaded_torch()
    part = _first_of_repeated(target.detach(), target.stride())[(*index, ...)]
    source = _tensor_over(bits, part.dtype, tuple(part.shape))
    if not (part.is_conj() or part.is_neg()):
        part, source = _as_integers(part, torch), _as_integers(source, torch)
    part.copy_(source)


def get_bits(source: Any, index: tuple[slice, ...], out: Bits) -> None:
    """Read a part of a leaf, bit for bit; the reverse of `put_bits`."""
    strides = source.strides if isinstance(source, np.ndarray) else source.stride()
    copy_bits(_first_of_repeated(source, strides)[(*index, ...)], out)


def extent_of(leaf: Any) -> tuple[str, int, int] | None:
    """Return device, first address and end of the memory in which the elements of a leaf lie."""
    if isinstance(leaf, np.ndarray):
        place, steps, width, device = leaf.__array_interface__["data"][0], leaf.strides, 1, "cpu"
        itemsize = leaf.itemsize
    else:
        place, steps, width, device = leaf.data_ptr(), leaf.stride(), leaf.element_size(), str(leaf.device)
        itemsize = width
    if 0 in leaf.shape:
        return None
    spans = [step * width * (length - 1) for step, length in zip(steps, leaf.shape, strict=True)]
    return device, place + sum(s for s in spans if s < 0), place + sum(s for s in spans if s > 0) + itemsize


def share_elements(left: Any, right: Any) -> bool:
    """Say whether two leaves on the host have an element in common; True where that is not known."""
    left, right = (leaf if isinstance(leaf, np.ndarray) else _numpy_view(leaf) for leaf in (left, right))
    if left is None or right is None:
        return True
    # The stub knows two special values only; any other number bounds the work, and True is the answer then.
    return bool(np.may_share_memory(left, right, max_work=_OVERLAP_WORK))  # type: ignore[arg-type]


def _numpy_view(tensor: Any) -> npt.NDArray[Any] | None:
    if not tensor.is_cpu or tensor.is_conj() or tensor.is_neg():
        return None
    view: npt.NDArray[Any] = _as_integers(tensor.detach(), loaded_torch()).numpy()
    return view


def _bare(source: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a view of bare bytes or whole numbers: a copy between such can never interpret a value."""
    width = source.dtype.itemsize
    return source.view(np.dtype(f"u{width}" if width in (1, 2, 4, 8) else f"V{width}"))


def torch_dtype(name: str) -> Any:
    """Return the torch dtype of that name; `UnknownFormatError` if this torch has none."""
    torch = require_torch()
    found = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(found, torch.dtype):
        raise UnknownFormatError(f"torch {torch.__version__} has no dtype {name!r}; upgrade torch")
    return found


def revive(library: str, bits: Bits, *, dtype: str, shape: tuple[int, ...]) -> Any:
    """Make a plain tensor on the CPU, or an array, from stored bits.

    Parameters
    ----------
    library : str
        ``"torch"`` or ``"numpy"``.
    bits : ndarray of uint8, shape (nbytes,)
        The result wraps this memory, without a copy, if it is writable, contiguous and aligned; the caller
        hands it over.
    dtype : str
        True dtype.
    shape : tuple of int
        Stored shape.

    Returns
    -------
    torch.Tensor or ndarray
        C-contiguous.

    Raises
    ------
    ConfigError
        If torch is needed and missing.
    CorruptDataError
        If the bits do not fit dtype and shape.
    UnknownFormatError
        If this version, or the installed torch, does not know the dtype.
    """
    try:
        width = itemsize_of(dtype)
    except LayoutError as error:
        raise UnknownFormatError(str(error)) from error
    if math.prod(shape) * width != bits.size:
        raise CorruptDataError(f"{bits.size} bytes do not fit shape {shape} of {dtype}")
    alignment = min(width & -width, 16)
    usable = bits.flags.writeable and bits.flags.c_contiguous and bits.ctypes.data % alignment == 0
    owned = bits if usable else np.array(bits)
    try:
        if library == "torch":
            of_torch = torch_dtype(dtype)
            return _tensor_over(owned, of_torch, shape)
        return owned.view(numpy_dtype(dtype)).reshape(shape)
    except ConfigError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        raise CorruptDataError(f"cannot make shape {shape} of {dtype} for {library}: {error}") from error


def dress(base: Any, form: Form) -> Any:
    """Give a plain tensor or array the form that was saved; the memory is shared with `base`.

    Raises
    ------
    CorruptDataError
        If the form does not fit, e.g. a gradient for whole numbers.

    Notes
    -----
    Memory formats, Fortran order and read-only flags are not kept (the elements are); a repeated view
    comes back read-only from numpy, and as `expand` makes it from torch. A tensor inside a graph comes
    back as a leaf of one.
    """
    if form.kind == "tensor" and not form.requires_grad and form.expand is None:
        return base
    try:
        if form.kind == "ndarray":
            return base if form.expand is None else np.broadcast_to(base, form.expand)
        whole = base.detach() if form.expand is None else base.detach().expand(form.expand)
        return _dress_tensor(whole, form)
    except ConfigError:
        raise
    except (ValueError, RuntimeError) as error:
        raise CorruptDataError(f"a leaf cannot take the form {form}: {error}") from error


def _dress_tensor(whole: Any, form: Form) -> Any:
    if form.kind == "parameter":
        return require_torch().nn.Parameter(whole, requires_grad=form.requires_grad)
    whole = whole.requires_grad_(form.requires_grad)
    if form.kind == "tensor":
        return whole
    return require_torch().nn.Buffer(whole, persistent=form.kind == "buffer")
