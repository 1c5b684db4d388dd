"""A device that is not there: tensors on the CPU that claim another device, and count what it would do.

    with FakeDevice() as fake:
        x = torch.randn(4, 4).to(fake.device)
        (x @ x).sum().item()
    fake.launches, fake.waits    # Counters by operation: 2 launches, 1 wait

Launches are operations that a device starts a kernel or a copy for; views, and memory that is not
initialised, cost none. Waits are operations that the host cannot go on from before the device is there: what
asks for a number, or for a size that depends on numbers, and copies that block. A composite operation counts
as what torch takes it apart into on a CPU, so that the figure is one to compare by, not a profile. Mixing
with tensors of the CPU, other than numbers, raises AssertionError, as does what torch itself would refuse.

The device calls itself meta, the one type beside the CPU that autograd takes everywhere. bfloat16 autocast is
on there, as it is in training.
"""

from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

META = torch.device("meta")
FREE = {  # views, and memory as it is found
    "view", "_unsafe_view", "_reshape_alias", "t", "transpose", "permute", "slice", "select", "split",
    "split_with_sizes", "unsqueeze", "squeeze", "expand", "detach", "alias", "unbind", "as_strided",
    "diagonal", "is_same_size", "unfold", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty",
    "new_empty_strided",
}
WAITING = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select",
           "equal", "is_nonzero"}
COPIES = {"copy_", "_to_copy"}


class Fake(torch.Tensor):
    @staticmethod
    def __new__(cls, data, owner):
        self = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype,
            device=META)
        self.data_, self.owner = data, owner
        return self

    def __repr__(self, *, tensor_contents=None):
        return f"Fake({tuple(self.shape)}, {self.dtype})"

    def tolist(self):  # torch's own reads the memory
        self.owner.waits["tolist"] += 1
        return self.data_.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        owner = next(x.owner for x in tree_leaves((args, kwargs)) if isinstance(x, Fake))
        return owner.dispatch(func, args, kwargs or {})


class FakeDevice(TorchDispatchMode):
    device = META

    def __enter__(self):
        self.launches, self.waits = Counter(), Counter()
        plain, self.patches = torch.tensor, ExitStack()
        for name, value in (("tensor", lambda data, device="cpu", **kw: plain(data, **kw).to(device)),
                            ("autocast", lambda *args, **kw: nullcontext()),
                            ("is_autocast_enabled", lambda kind=None: kind == "meta"),
                            ("get_autocast_dtype", lambda kind: torch.bfloat16)):
            self.patches.enter_context(mock.patch.object(torch, name, value))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.patches.close()

    @contextmanager
    def counted_as(self, name, launches):
        """What is done inside counts as so many launches."""
        before = self.launches.copy(), self.waits.copy()
        yield
        self.launches, self.waits = before
        self.launches[name] += launches

    def put(self, data):
        """A tensor of the CPU on the device, at no cost."""
        return Fake(data.detach(), self)

    def put_module(self, module):
        """Parameters and buffers, too."""
        for part in module.modules():
            for name, value in part.named_parameters(recurse=False):
                made = torch.nn.Parameter(self.put(value), requires_grad=value.requires_grad)
                part.register_parameter(name, made)
            for name, value in part.named_buffers(recurse=False):
                part._buffers[name] = self.put(value)
        return module

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        wanted = kwargs.get("device")
        if (wanted is not None and torch.device(wanted).type == "meta") or any(
                isinstance(x, Fake) for x in tree_leaves((args, kwargs))):
            return self.dispatch(func, args, kwargs)
        return func(*args, **kwargs)

    def dispatch(self, func, args, kwargs):
        name, overload = func.__name__.split(".")
        wanted, leaves = kwargs.get("device"), tree_leaves((args, kwargs))
        to_cpu = name == "_to_copy" and wanted is not None and torch.device(wanted).type == "cpu"
        to_cpu |= name == "copy_" and not isinstance(args[0], Fake)
        self._refuse(name, leaves)
        if name not in FREE:
            self.launches[name] += 1
        if self._waits(name, overload, args, kwargs, leaves, to_cpu):
            self.waits[name] += 1
        if wanted is not None:
            kwargs = {**kwargs, "device": "cpu"}
        bare = lambda x: x.data_ if isinstance(x, Fake) else x  # noqa: E731
        found = func(*tree_map(bare, args), **tree_map(bare, kwargs))
        if to_cpu or not isinstance(found, (torch.Tensor, tuple, list)):
            return found
        if "out" in kwargs:
            return kwargs["out"]
        if name.endswith("_") and isinstance(args[0], Fake):
            return args[0]
        return tree_map(lambda x: Fake(x, self) if isinstance(x, torch.Tensor) else x, found)

    def _refuse(self, name, leaves):
        if name in COPIES or not any(isinstance(x, Fake) for x in leaves):
            return
        for x in leaves:
            if isinstance(x, torch.Tensor) and not isinstance(x, Fake) and x.dim():
                raise AssertionError(f"{name} mixes the device with a CPU tensor {tuple(x.shape)}")

    def _waits(self, name, overload, args, kwargs, leaves, to_cpu):
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None
        if name.startswith(("index", "_index_put", "_unsafe_index")):  # by a mask: how many are there?
            return any(isinstance(x, Fake) and x.dtype in (torch.bool, torch.uint8)
                       for x in tree_leaves(args[1]) if name != "index_select")
        if name in COPIES:
            source = args[1] if name == "copy_" else args[0]
            crosses = to_cpu or not isinstance(source, Fake)
            later = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
            return crosses and (to_cpu or not later)
        return name in WAITING
