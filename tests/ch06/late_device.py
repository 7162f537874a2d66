"""A device that works late: what a program forgot to wait for goes wrong.

``LateDevice`` stands for a GPU where there is none. Operators are queued per
stream and executed whenever a drawn schedule says so; waits are kept, and
nothing else orders two streams. Memory is handed out like the caching
allocator's: a freed block is reused at once by the stream it was made on,
even if another stream has yet to read it, unless ``record_stream`` was
called. Memory that was never written holds ones in every bit. So a missing
wait shows as a wrong value, which is what a GPU would show on a bad day.

Inside ``with LateDevice(seed) as late:`` tensors move to ``late.device`` by
the usual calls, and ``torch.get_device_module(late.device)`` is ``late``.
"""

import contextlib
import random
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
DEVICE = torch.device("meta")  # a name that no real device here answers to


class Block:
    """Memory of the device; freed when the last tensor in it dies."""


class LateTensor(torch.Tensor):
    """What the host holds of a device tensor: a shape and an address."""

    @staticmethod
    def __new__(cls, late, block, memory):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=DEVICE,
        )

    def __init__(self, late, block, memory):
        self.late, self.block, self.memory = late, block, memory

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError(f"{function} outside `with LateDevice()`")

    def record_stream(self, stream):
        self.late.calls.append(("record_stream", stream.name))
        self.late.users[id(self.block)].add(stream)


class Stream:
    """Operators in order; ``done`` of them have been executed."""

    def __init__(self, late, name):
        self.late, self.name = late, name
        self.queue, self.done = [], 0

    def put(self, label, run=None, after=None):
        """Queue an operator, or a wait for ``after``: (stream, position)."""
        self.queue.append((label, run, after))
        self.late.work()

    def ready(self):
        if self.done == len(self.queue):
            return False
        after = self.queue[self.done][2]
        return after is None or after[0].done >= after[1]

    def step(self):
        _, run, _ = self.queue[self.done]
        if run is not None:
            run()
        self.done += 1

    def tail(self):
        return self, len(self.queue)

    def wait_stream(self, other):
        self.late.calls.append(("wait_stream", self.name, other.name))
        self.put("wait", after=other.tail())

    def wait_event(self, event):
        self.late.calls.append(("wait_event", self.name))
        self.put("wait", after=event.place)

    def record_event(self, event=None):
        event = event or Event(self.late)
        event.record(self)
        return event

    def synchronize(self):
        self.late.finish(*self.tail())


class Event:
    """A place in a stream."""

    def __init__(self, late):
        self.late, self.place = late, None

    def record(self, stream=None):
        stream = stream or self.late.current_stream()
        self.late.calls.append(("record", stream.name))
        self.place = stream.tail()

    def wait(self, stream=None):
        (stream or self.late.current_stream()).wait_event(self)

    def query(self):
        return self.place is None or self.place[0].done >= self.place[1]

    def synchronize(self):
        self.late.calls.append(("synchronize",))
        if self.place is not None:
            self.late.finish(*self.place)


class LateDevice(TorchDispatchMode):
    """A device with streams, events, an allocator and a mind of its own.

    Args:
        seed: of the schedule. None: nothing is done before somebody waits.
    """

    device = DEVICE

    def __init__(self, seed=None):
        super().__init__()
        self.random = None if seed is None else random.Random(seed)
        # how eagerly each stream works, so that some fall far behind
        self.rates, self.streams = {}, []
        self.pinned = set()  # storages of the host
        self.pools, self.freed = {}, []
        self.sizes, self.users = {}, {}
        self.calls, self.waits, self.allocated = [], 0, 0
        self.now = self.Stream()
        self.saved = None

    # ---- the device's module --------------------------------------------

    def Stream(self, device=None, priority=0):
        stream = Stream(self, "side" if self.streams else "compute")
        self.streams.append(stream)
        if self.random:
            self.rates[stream] = self.random.choice([0.02, 0.5, 1.0])
        return stream

    def Event(self, enable_timing=False):
        return Event(self)

    def current_stream(self, device=None):
        return self.now

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def synchronize(self, device=None):
        for stream in list(self.streams):
            self.finish(*stream.tail())

    def pin(self, tensor):
        """Give a host tensor page-locked memory."""
        tensor = tensor.clone()
        self.pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    # ---- time ------------------------------------------------------------

    def work(self):
        """Let the device do some of what is queued, or nothing."""
        if self.random is None:
            return
        for _ in range(self.random.randrange(4)):
            ready = [s for s in self.streams if s.ready()]
            for stream in ready:
                if self.random.random() < self.rates[stream]:
                    stream.step()

    def finish(self, stream, position):
        """Have the host wait until ``stream`` has come so far."""
        self.waits += 1
        while stream.done < position:
            ready = [s for s in self.streams if s.ready()]
            assert ready, "the streams wait for each other"
            if self.random:
                self.random.choice(ready).step()
            else:  # no other stream goes further than it is waited for
                needed = stream
                while not needed.ready():
                    needed = needed.queue[needed.done][2][0]
                needed.step()

    # ---- memory ----------------------------------------------------------

    def allocate(self, like):
        """Return a tensor of ``like``'s shape in memory of this stream."""
        self.reclaim()
        size = max(1, like.numel()) * like.element_size()
        size = (size + 511) // 512 * 512
        pool = self.pools.setdefault((self.now, size), [])
        if pool:
            raw = pool.pop()
        else:
            self.allocated += size
            raw = torch.full((size,), 255, dtype=torch.uint8)
        block = Block()
        self.users[id(block)] = set()
        last = weakref.finalize(
            block, self.free, id(block), pool, self.now, raw
        )
        last.atexit = False
        count = like.numel() * like.element_size()
        there = raw[:count].view(like.dtype).view(like.size())
        return LateTensor(self, block, there)

    def free(self, name, pool, owner, raw):
        users = self.users.pop(name) - {owner}
        if users:  # not before they are where they are now
            self.freed.append((pool, raw, [user.tail() for user in users]))
        else:
            pool.append(raw)

    def reclaim(self):
        kept = []
        for pool, raw, places in self.freed:
            if all(stream.done >= place for stream, place in places):
                pool.append(raw)
            else:
                kept.append((pool, raw, places))
        self.freed = kept

    # ---- operators ---------------------------------------------------------

    def __enter__(self):
        self.saved = torch.get_device_module
        torch.get_device_module = lambda device=None: (
            self
            if device is not None and torch.device(device) == DEVICE
            else self.saved(device)
        )
        return super().__enter__()

    def __exit__(self, *error):
        torch.get_device_module = self.saved
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves, _ = tree_flatten((args, kwargs))
        late = [leaf for leaf in leaves if isinstance(leaf, LateTensor)]
        if not late and kwargs.get("device") != DEVICE:
            return function(*args, **kwargs)
        if function is aten._to_copy.default:
            return self.to(*args, **kwargs)
        if function is aten.copy_.default:
            return self.copy(*args, **kwargs)
        if function is aten._local_scalar_dense.default:
            self.finish(*self.now.tail())
            return args[0].memory.item()
        if function.namespace == "aten" and "empty" in function.__name__:
            return self.allocate(function(*tree_map(shape, args), **kwargs))
        return self.operate(function, args, kwargs)

    def operate(self, function, args, kwargs):
        """Queue an operator; its results get their memory at once."""
        schema = function._schema
        real, named = tree_map(memory, (args, kwargs))
        if "device" in named:
            named["device"] = torch.device("cpu")
        name = schema.name.removeprefix("aten::")
        if schema.is_mutable:
            self.now.put(name, lambda: function(*real, **named))
            return kwargs.get("out", args[0])
        if any(result.alias_info for result in schema.returns):
            # a view: another way to look at the same memory
            view = function(*real, **named)
            return LateTensor(self, args[0].block, view)
        found = function(*tree_map(shape, args), **tree_map(shape, kwargs))
        found = tree_map(
            lambda x: self.allocate(x) if torch.is_tensor(x) else x, found
        )
        places = [x.memory for x in tree_flatten(found)[0]]

        def run():
            results = tree_flatten(function(*real, **named))[0]
            for place, result in zip(places, results, strict=True):
                place.copy_(result)

        self.now.put(name, run)
        return found

    def to(self, source, *, dtype=None, device=None, non_blocking=False, **_):
        dtype = dtype or source.dtype
        like = torch.empty(source.size(), dtype=dtype, device="meta")
        if device is None or device == DEVICE:
            return self.copy(self.allocate(like), source, non_blocking)
        there = torch.empty(source.size(), dtype=dtype)
        there.view(torch.uint8).fill_(255)
        if non_blocking:  # as CUDA does: page-locked, so nobody waits
            self.pinned.add(there.untyped_storage().data_ptr())
        return self.copy(there, source, non_blocking)

    def copy(self, there, here, non_blocking=False):
        """Queue a copy; the host waits unless it allows not to."""
        to, source = memory(there), memory(here)
        self.now.put("copy", lambda: to.copy_(source))
        host = [t for t in (there, here) if not isinstance(t, LateTensor)]
        if host:
            pinned = host[0].untyped_storage().data_ptr() in self.pinned
            if not (non_blocking and pinned):
                self.finish(*self.now.tail())
        return there

    def before(self, stream, position):
        """Return how far each stream must be for ``stream`` to be there.

        Whatever lies beyond may run at the same time, or later.
        """
        reach, asked = {}, [(stream, position)]
        while asked:
            stream, position = asked.pop()
            seen = reach.get(stream, 0)
            for _, _, after in stream.queue[seen:position]:
                if after is not None:
                    asked.append(after)
            reach[stream] = max(seen, position)
        return reach


def memory(leaf):
    """Return where a device tensor lies; anything else as it is."""
    return leaf.memory if isinstance(leaf, LateTensor) else leaf


def shape(leaf):
    """Return a tensor's shape without its values."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = memory(leaf)
    return torch.empty_strided(
        leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta"
    )
