"""A span is cut into pieces, each of which has exactly one owner.

The GPU's kernels and copies own the time they run in: computing before
communication before copies, so that what is left of a collective or a copy
is its *exposed* time.  Time without any GPU work belongs to whatever kept
the host from having launched the next piece of work.  All times are whole
nanoseconds, so that the parts add up to the span without a remainder.
"""

import re
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ch04_profiling import event_names as names

CODE = {name: code for code, name in enumerate(names.PARTS)}
# a longer gap without an operator is a piece of Python that deserves a name
PYTHON_GAP_NS = 1_000_000
# where events were left out of a recording, one this long says nothing
UNSEEN_NS = 5_000_000
# from the end of one queued kernel to the start of the next
QUEUE_GAP_NS = 50_000
# an ordinary launch takes 5 to 50 µs; one that loads code takes far more
LONG_CALL_NS = 2_000_000
# an operator shorter than this is mostly the call, not the work
TINY_OPERATOR_NS = 25_000
# between the operators it calls, one that is silent for longer computes
OWN_WORK_NS = 2 * TINY_OPERATOR_NS
ALLOCATION = re.compile(
    r"^(cuda|hip)(Free|Malloc|Host(Alloc|Malloc|Free|(Unr|R)egister))|^cuMem"
)


@dataclass
class Account:
    """Where the time of one rank went.

    bounds (n + 1) and owner (n): piece i is [bounds[i], bounds[i + 1]) and
    belongs to ``names.PARTS[owner[i]]``; ``unions`` holds the merged
    intervals of each kind of work, hidden or not.
    """

    bounds: np.ndarray
    owner: np.ndarray
    unions: dict
    on_gpu: bool
    gpu: np.ndarray  # indices of the events that count as the device's work
    work: np.ndarray  # of these, the code of their part
    lanes: np.ndarray  # host lanes that launch work
    launch: np.ndarray  # of each of these, the event that launched it, or -1
    sync: dict
    loader: tuple  # merged waits for the loader, in ns
    uploading: tuple  # merged calls that held the host for a copy to the GPU
    steps: list
    queued: tuple  # gaps before work that was launched earlier: when, in ns
    python: tuple  # merged gaps in which the host was in no operator
    allocating: tuple  # merged calls that reserve memory in every step
    between: tuple  # CPU operators' own work between those they call

    @property
    def span_ns(self):
        return int(self.bounds[-1] - self.bounds[0])

    def parts_ns(self, low=None, high=None):
        """Return ns by part between two times; they add up exactly."""
        edges = self.bounds
        if low is not None:
            edges = np.clip(edges, low, high)
        sums = np.zeros(len(names.PARTS), np.int64)
        np.add.at(sums, self.owner, np.diff(edges))
        return dict(zip(names.PARTS, sums.tolist(), strict=True))

    def total_ns(self, part):
        """Return the length of a kind of work, hidden or not, in ns."""
        starts, ends = self.unions.get(part, _NONE)
        return int((ends - starts).sum())


_EMPTY = np.empty(0, np.int64)
_NONE = (_EMPTY, _EMPTY)


def merge(starts, ends):
    """Merge intervals that touch: sorted starts and ends without overlap."""
    if not len(starts):
        return _NONE
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    reach = np.maximum.accumulate(ends)
    first = np.ones(len(starts), bool)
    first[1:] = starts[1:] > reach[:-1]
    last = np.append(np.flatnonzero(first)[1:] - 1, len(starts) - 1)
    low, high = starts[first], reach[last]
    keep = high > low
    return low[keep], high[keep]


def inside(union, points):
    """Say of each point whether a merged interval holds it."""
    starts, ends = union
    if not len(starts):
        return np.zeros(len(points), bool)
    at = np.searchsorted(starts, points, side="right") - 1
    return (at >= 0) & (points < ends[np.maximum(at, 0)])


def overlap_ns(one, other):
    """Return how long two merged unions overlap."""
    if not len(one[0]) or not len(other[0]):
        return 0
    edges = np.unique(np.concatenate([*one, *other]))
    middle = edges[:-1]
    both = inside(one, middle) & inside(other, middle)
    return int(np.diff(edges)[both].sum())


def seen(trace):
    """Say whether calls or operators of the host were recorded."""
    return np.isin(trace.kind, [names.RUNTIME, names.OPERATOR]).any()


def by_name(trace, function):
    """Return ``function(name)`` for every name of a trace, as an array."""
    return np.array([function(name) for name in trace.names])


def optimizing(trace):
    """Return the merged times in which an optimizer's step ran."""
    named = by_name(trace, lambda n: n.startswith("Optimizer.step#"))
    ranges = named[trace.name]
    return merge(trace.start[ranges], trace.end[ranges])


def account(trace):
    """Cut a trace's span into pieces with one owner each."""
    if (trace.kind == names.GPU).any():
        return _with_gpu(trace)
    return _without_gpu(trace)


# ---- with a GPU ----------------------------------------------------------


def _with_gpu(trace):
    gpu = np.flatnonzero((trace.kind == names.GPU) & (trace.end > trace.start))
    host = _Host(trace)
    codes = by_name(trace, lambda name: CODE[names.work_on_gpu(name)])
    work = codes[trace.name[gpu]] if len(gpu) else np.empty(0, int)
    launch = host.launch_of(gpu)
    work = _optimizer_of_its_step(trace, work, launch)
    unions = {
        part: merge(
            trace.start[gpu][work == CODE[part]],
            trace.end[gpu][work == CODE[part]],
        )
        for part in names.WORK
    }
    host.narrow(launch)
    edges = [np.array(trace.window, np.int64)]
    edges += [edge for union in unions.values() for edge in union]
    bounds = np.unique(np.concatenate(edges))
    owner = np.full(len(bounds) - 1, -1)
    for part in reversed(names.WORK):
        owner[inside(unions[part], bounds[:-1])] = CODE[part]
    bounds, owner = _joined(bounds, owner)
    sync = host.sync_calls(gpu, launch)
    bounds, owner, queued, python = _explain(
        trace, host, bounds, owner, gpu, launch
    )
    return Account(
        bounds=bounds,
        owner=owner,
        unions=unions,
        on_gpu=True,
        gpu=gpu,
        work=work,
        lanes=host.lanes,
        launch=launch,
        sync=sync,
        loader=host.union(names.LOADER),
        uploading=merge(trace.start[host.uploads], trace.end[host.uploads]),
        steps=host.steps,
        queued=queued,
        python=python,
        allocating=host.allocating,
        between=(_EMPTY, _EMPTY, *_NONE),
    )


def _joined(bounds, owner):
    """Join neighbours that have the same owner."""
    first = np.ones(len(owner), bool)
    first[1:] = owner[1:] != owner[:-1]
    return np.append(bounds[:-1][first], bounds[-1]), owner[first]


def _optimizer_of_its_step(trace, work, launch):
    """Count element-wise kernels that Optimizer.step launched as its own."""
    union = optimizing(trace)
    known = launch >= 0
    points = np.where(known, trace.start[launch], -1)
    plain = np.isin(work, [CODE["elementwise"], CODE["other_kernel"]])
    work = work.copy()
    work[plain & known & inside(union, points)] = CODE["optimizer"]
    return work


class _Host:
    """What the threads that feed the GPU were doing, and when."""

    def __init__(self, trace):
        self.trace = trace
        host = trace.kind != names.GPU
        pairs = sorted({(int(k), int(n)) for k, n in _pairs(trace, host)})
        table = np.zeros((len(names.KINDS), max(len(trace.names), 1)), int)
        for kind, name in pairs:
            table[kind, name] = names.host_meaning(kind, trace.names[name])
        meaning = table[trace.kind, trace.name]
        meaning[~host] = names.NOTHING
        self.meaning = meaning
        self.lanes = np.unique(trace.lane[host])
        self.uploads = _EMPTY  # calls that copy to the GPU
        self.allocating = _NONE
        self.steps = _steps(trace)
        self.cache = {}

    def launch_of(self, gpu):
        """Return, for each GPU event, the index of its launch, or -1."""
        trace = self.trace
        calls = np.flatnonzero(
            (trace.kind == names.RUNTIME) & (trace.correlation >= 0)
        )
        found = np.full(len(gpu), -1)
        if not len(calls) or not len(gpu):
            return found
        order = np.argsort(trace.correlation[calls], kind="stable")
        calls = calls[order]
        numbers = trace.correlation[calls]
        wanted = trace.correlation[gpu]
        at = np.searchsorted(numbers, wanted)
        at = np.minimum(at, len(calls) - 1)
        same = (numbers[at] == wanted) & (wanted >= 0)
        found[same] = calls[at[same]]
        return found

    def narrow(self, launch):
        """Leave out threads that neither launch work nor lead the steps."""
        trace = self.trace
        starts = by_name(trace, lambda n: bool(names.STEP.match(n)))
        leads = trace.lane[starts[trace.name] & (trace.kind != names.GPU)]
        launches = trace.lane[launch[launch >= 0]]
        if len(launches):
            self.lanes = np.unique(np.concatenate([launches, leads]))
        # a call that waits for its own copy is a synchronising call
        self._blocking_copies(launch)
        self._long_calls()

    def _blocking_copies(self, launch):
        trace, known = self.trace, launch >= 0
        if not known.any():
            return
        gpu = np.flatnonzero(
            (trace.kind == names.GPU) & (trace.end > trace.start)
        )[known]
        call = launch[known]
        took = trace.end[call] - trace.start[call]
        # it came back after the copy, or it staged pageable memory
        waited = (trace.end[call] >= trace.end[gpu]) & (took > 20_000)
        waited |= took > 200_000
        copies = by_name(trace, lambda n: "emcpy" in n)[trace.name[call]]
        chosen = waited & copies
        self.meaning[call[chosen]] = names.SYNC
        uploads = by_name(trace, lambda n: names.work_of_copy(n) == "copy_h2d")
        chosen &= uploads[trace.name[gpu]]
        self._first_copies(call[chosen], gpu[chosen])

    def _first_copies(self, calls, copies):
        """Tell copies that hold the host from a driver that is starting.

        A call far longer than its copy, while the GPU did nothing else,
        was not copying.
        """
        trace = self.trace
        gpu = trace.kind == names.GPU
        busy = merge(trace.start[gpu], trace.end[gpu])
        took = trace.end[calls] - trace.start[calls]
        own = trace.end[copies] - trace.start[copies]
        other = np.zeros(len(calls), bool)
        for at in np.flatnonzero(took > LONG_CALL_NS).tolist():
            call = trace.start[calls[at]], trace.end[calls[at]]
            call = tuple(np.array([edge]) for edge in call)
            unused = took[at] - overlap_ns(call, busy)
            other[at] = unused > max(LONG_CALL_NS, 3 * own[at])
        other[other] = ~self._in_every_step(calls[other])
        self.meaning[calls[other]] = names.START_UP
        self.uploads = calls[~other]

    def _long_calls(self):
        """Tell a program's start from what each of its steps repeats.

        A launch of milliseconds loads code, once; a call that reserves
        memory does so in every step where the allocator's cache is short.
        """
        trace = self.trace
        took = trace.end - trace.start
        runtime = trace.kind == names.RUNTIME
        long = runtime & (self.meaning == names.ACTIVE) & (took > LONG_CALL_NS)
        for name in np.unique(trace.name[long]).tolist():
            mine = runtime & (trace.name == name)
            if mine.sum() > 2 and np.median(took[mine]) > LONG_CALL_NS:
                long[mine] = False  # every one: that is what it costs
        calls = np.flatnonzero(long)
        once = calls[~self._in_every_step(calls)]
        calls = np.flatnonzero(runtime & (self.meaning == names.START_UP))
        repeated = calls[self._in_every_step(calls)]
        reserves = by_name(trace, lambda n: bool(ALLOCATION.match(n)))
        reserves = reserves[trace.name[repeated]]
        self.meaning[once] = names.START_UP
        self.meaning[repeated[~reserves]] = names.ACTIVE
        mine = repeated[reserves]
        self.allocating = merge(trace.start[mine], trace.end[mine])

    def _in_every_step(self, calls):
        """Say of each call whether later steps repeat it, to the last.

        One far longer than its likes is not theirs.
        """
        trace, found = self.trace, np.zeros(len(calls), bool)
        steps = self.steps or _between_optimizers(trace)
        if len(steps) < 3 or not len(calls):
            return found
        lows = np.array([low for _, low, _ in steps])
        highs = np.array([high for _, _, high in steps])
        place = np.searchsorted(lows, trace.start[calls], side="right") - 1
        place[trace.start[calls] >= highs[place]] = -1
        took = trace.end[calls] - trace.start[calls]
        for name in np.unique(trace.name[calls]).tolist():
            mine = trace.name[calls] == name
            later = np.unique(place[mine & (place > 0)])
            often = 2 * len(later) >= len(steps) - 1 and len(later) > 1
            if often and later[-1] >= len(steps) - 2:
                usual = np.median(took[mine & (place > 0)])
                found |= mine & (place >= 0) & (took <= 10 * usual)
        return found

    def unseen(self, silent, edges):
        """Say of each silent piece whether nothing tells what was done.

        Between two signs of a thread's life it ran Python; what came before
        the first and after the last of them, nobody knows.  Where no step
        is marked, nothing waits before the GPU's first and after its last
        work either.
        """
        trace = self.trace
        mine = np.isin(trace.lane, self.lanes) & (trace.kind != names.GPU)
        marks = by_name(trace, lambda n: bool(names.STEP.match(n)))
        marks = marks[trace.name] & mine
        events = mine & ~marks
        if not seen(trace):
            return silent
        signs = [trace.start[marks], trace.start[events], trace.end[events]]
        signs = np.concatenate(signs)
        begins, ends = runs(silent, edges)
        lengths = ends - begins
        longest = edges[-1] - edges[0]
        low, high = edges[0], edges[-1]
        if self.steps:
            low, high = self.steps[0][1], max(s[2] for s in self.steps)
        else:  # one event with a wrong clock is no sign
            longest = longest // 2
            if (gpu := trace.kind == names.GPU).any():
                low, high = trace.start[gpu].min(), trace.end[gpu].max()
        signs = signs[(signs >= low) & (signs <= high)]
        if any(said["kind"] == "sampled" for said in trace.warnings):
            longest = UNSEEN_NS
        least, most = signs.min(initial=edges[-1]), signs.max(initial=0)
        outside = (begins < least) | (ends > most)
        unknown = outside & (lengths > PYTHON_GAP_NS) | (lengths > longest)
        return silent & unknown

    def union(self, meaning, lane=None):
        """Return the merged times in which a thread (or any) did this."""
        key = meaning, lane
        if key not in self.cache:
            trace = self.trace
            if meaning == names.ACTIVE:
                chosen = (self.meaning != names.NOTHING) & (
                    self.meaning != names.LOADER
                )
            else:
                chosen = self.meaning == meaning
            if lane is None:
                chosen &= np.isin(trace.lane, self.lanes)
            else:
                chosen &= trace.lane == lane
            self.cache[key] = merge(trace.start[chosen], trace.end[chosen])
        return self.cache[key]

    def sync_calls(self, gpu, launch):
        """Return per name of waiting call: count, ns, and who called it."""
        trace = self.trace
        calls = np.flatnonzero(
            (self.meaning == names.SYNC) & np.isin(trace.lane, self.lanes)
        )
        callers = _callers(trace, calls)
        found = {}
        for call, caller in zip(calls.tolist(), callers, strict=True):
            name = trace.names[trace.name[call]]
            row = found.setdefault(
                name, {"count": 0, "ns": 0, "callers": {}, "longest": (0, 0)}
            )
            length = int(trace.end[call] - trace.start[call])
            row["count"] += 1
            row["ns"] += length
            row["longest"] = max(
                row["longest"], (length, int(trace.start[call]))
            )
            if caller:
                row["callers"][caller] = row["callers"].get(caller, 0) + 1
        return found


def _pairs(trace, chosen):
    packed = trace.kind[chosen].astype(np.int64) << 32
    packed += trace.name[chosen]
    for value in np.unique(packed).tolist():
        yield value >> 32, value & 0xFFFFFFFF


def _callers(trace, calls):
    """Return for each call the outermost operator around it, or None."""
    callers = [None] * len(calls)
    for lane in np.unique(trace.lane[calls]) if len(calls) else []:
        operators = by_name(trace, lambda n: "::" in n)[trace.name]
        mine = np.flatnonzero(
            (trace.kind == names.OPERATOR) & (trace.lane == lane) & operators
        )
        if not len(mine):
            continue
        # outermost: operators that no earlier one on the lane still holds
        reach = np.maximum.accumulate(trace.end[mine])
        outer = np.ones(len(mine), bool)
        outer[1:] = trace.end[mine][1:] > reach[:-1]
        item = by_name(trace, lambda n: n == "aten::item")[trace.name[mine]]
        for group in (mine[outer], mine[item]):
            if not len(group):
                continue
            for place in np.flatnonzero(trace.lane[calls] == lane):
                call = calls[place]
                at = np.searchsorted(
                    trace.start[group], trace.start[call], side="right"
                )
                if at and trace.end[group[at - 1]] >= trace.end[call]:
                    callers[place] = trace.names[trace.name[group[at - 1]]]
    return callers


def _explain(trace, host, bounds, owner, gpu, launch):
    """Give every piece without GPU work to its cause on the host.

    Returns also the gaps before work that was already launched, and those
    in which the host was in no operator.
    """
    idle = np.flatnonzero(owner < 0)
    if not len(idle):
        return bounds, owner, (_EMPTY, *_NONE), _NONE
    lows, highs = bounds[idle], bounds[idle + 1]
    waiting, launched = _waiting_for(trace, lows, highs, gpu, launch)
    causes = (
        names.LOADER,
        names.SYNC,
        names.START_UP,
        names.COMPILATION,
        names.ACTIVE,
    )
    lanes = _busiest(trace, host)
    edges = [bounds]
    edges += [e for lane in lanes for c in causes for e in host.union(c, lane)]
    edges = np.unique(np.concatenate(edges))
    edges = edges[(edges >= bounds[0]) & (edges <= bounds[-1])]
    gap = np.searchsorted(bounds, edges[:-1], side="right") - 1
    piece = owner[gap]
    points = edges[:-1]
    free = piece < 0
    cause, silent = _cause(host, lanes, points, edges)
    piece = np.where(free, cause, piece)
    position = np.searchsorted(idle, gap)
    position = np.minimum(position, len(idle) - 1)
    # the work was queued in time: the host is not to blame for the wait
    queued = free & waiting[position]
    short = (highs - lows)[position] <= QUEUE_GAP_NS
    piece[queued & short] = CODE["idle_host"]
    piece[queued & ~short] = CODE["idle_unknown"]
    late = waiting & (highs - lows > QUEUE_GAP_NS)
    begins, ends = runs(silent, edges)
    python = free & ~queued & silent & (piece == CODE["idle_host"])
    python &= ends - begins > PYTHON_GAP_NS
    free &= ~queued
    bounds, owner = _drained(host, edges, piece, free, python, position, lows)
    return (
        bounds,
        owner,
        (lows[late], highs[late], launched[late]),
        merge(edges[:-1][python], edges[1:][python]),
    )


def _busiest(trace, host, count=16):
    """Return the threads to look at: those with most events, if too many."""
    lanes, events = np.unique(
        trace.lane[np.isin(trace.lane, host.lanes)], return_counts=True
    )
    return lanes[np.argsort(-events)[:count]].tolist()


def _waiting_for(trace, lows, highs, gpu, launch):
    """Say of each gap whether the work after it was launched before, when."""
    if not len(gpu):
        return np.zeros(len(lows), bool), lows
    starts = trace.start[gpu]
    at = np.searchsorted(starts, highs)
    after = np.minimum(at, len(gpu) - 1)
    call = launch[after]
    launched = np.where(call >= 0, trace.end[call], np.iinfo(np.int64).max)
    # numbers grow: this one was launched before the recording began
    number, known = trace.correlation[gpu], launch >= 0
    first = number[known].min(initial=np.iinfo(np.int64).max)
    old = ~known & (number >= 0) & (number < first) & known.any()
    launched[old[after]] = trace.window[0]
    follows = (at < len(gpu)) & (starts[after] == highs)
    return follows & (launched <= lows), launched


def _cause(host, lanes, points, edges):
    """Return the code of what the host did at each of these times.

    And whether no thread was in an operator, a call or a loader then.
    """
    count = len(points)
    active = {
        lane: inside(host.union(names.ACTIVE, lane), points) for lane in lanes
    }
    crowd = np.zeros(count, int)
    for mask in active.values():
        crowd += mask
    # nobody in an operator: Python between two of them, or unseen
    silent = crowd == 0
    cause = np.full(count, CODE["idle_host"])
    cause[host.unseen(silent, edges)] = CODE["idle_unknown"]
    for meaning, part in (
        (names.SYNC, "idle_sync"),
        (names.START_UP, "idle_start_up"),
        (names.COMPILATION, "idle_compilation"),
        (names.LOADER, "idle_loader"),
    ):
        for lane in lanes:
            mask = inside(host.union(meaning, lane), points)
            if meaning in (names.SYNC, names.LOADER):
                # another thread that feeds the GPU was at work meanwhile
                mask &= crowd - active[lane] == 0
            cause[mask] = CODE[part]
    return cause, silent


def runs(mask, edges):
    """Return for each piece where its run of equally masked ones is."""
    change = np.flatnonzero(np.diff(mask.astype(np.int8))) + 1
    first = np.concatenate([[0], change])
    last = np.append(change, len(mask))
    sizes = last - first
    return np.repeat(edges[first], sizes), np.repeat(edges[last], sizes)


def _drained(host, edges, piece, free, python, position, lows):
    """Charge a synchronising call with the gap it opened.

    While the host waits, it cannot run ahead; of the gap that follows, at
    most as much is the call's doing as the host had waited before, and of
    a long piece of Python little: that would be worth more to shorten.
    """
    calls = host.union(names.SYNC)
    if not len(calls[0]):
        return _joined(edges, piece)
    at = np.searchsorted(calls[0], lows, side="right") - 1
    held = np.maximum(at, 0)
    # ended with the GPU's work, or a notification (≤ 50 µs) after it
    opened = (at >= 0) & (calls[1][held] >= lows - 50_000)
    budget = np.where(opened, lows - calls[0][held], 0)
    lengths = np.diff(edges)
    counted = free & (piece == CODE["idle_host"])
    mine = np.where(counted, lengths, 0)
    mine[python] = np.minimum(mine[python], PYTHON_GAP_NS)
    before = np.cumsum(mine) - mine
    first = np.zeros(len(lows), np.int64)
    seen, where = np.unique(position[free], return_index=True)
    first[seen] = before[np.flatnonzero(free)[where]]
    share = np.clip(budget[position] - (before - first[position]), 0, mine)
    cut = np.flatnonzero((share > 0) & (share < lengths))
    piece = piece.copy()
    piece[share == lengths] = np.where(
        lengths[share == lengths] > 0,
        CODE["idle_sync"],
        piece[share == lengths],
    )
    at_ns = edges[:-1][cut] + share[cut]
    edges = np.insert(edges, cut + 1, at_ns)
    piece = np.insert(piece, cut, CODE["idle_sync"])
    return _joined(edges, piece)


def _between_optimizers(trace):
    """Return (name, low, high) from one optimizer's step to the next."""
    begins = by_name(trace, lambda n: n.startswith("Optimizer.step#"))
    lows = trace.start[begins[trace.name] & (trace.kind != names.GPU)]
    edges = [*lows.tolist(), trace.window[1]]
    return [("", *pair) for pair in pairwise(edges)]


def _steps(trace):
    """Return the marked steps: (name, low, high) in ns, in order."""
    numbers = by_name(
        trace,
        lambda n: int(found[1]) if (found := names.STEP.match(n)) else -1,
    )
    marked = np.flatnonzero(
        (numbers[trace.name] >= 0) & (trace.kind != names.GPU)
    )
    found = {}
    for event in marked.tolist():
        number = int(numbers[trace.name[event]])
        low, high = int(trace.start[event]), int(trace.end[event])
        old = found.get(number)
        if old is None or high - low > old[1] - old[0]:
            found[number] = (low, high)
    return [(f"step {n}", *found[n]) for n in sorted(found)]


# ---- without a GPU -------------------------------------------------------


def _without_gpu(trace):
    """The CPU is the device: its operators are the work.

    Each moment belongs to the innermost one, unless that only calls others.
    """
    host = _Host(trace)
    host.lanes = np.unique(trace.lane)
    codes = by_name(
        trace,
        lambda name: CODE.get(names.work_of_operator(name), -1),
    )
    work = codes[trace.name]
    long = trace.end - trace.start >= _least_ns(trace)
    leaf = _leaves(trace, (work >= 0) & long)
    within, *between = _between(trace, (work >= 0) & long & ~leaf)
    talk = work == CODE["communication"]
    counted = (leaf & (work >= 0) & long) | talk
    if of_gpu_job(trace):
        # its operators only launch, the work is not seen
        counted[:], within = False, within[:0]
        between = [edge[:0] for edge in between]
    # what the loader or the compiler computes is theirs
    for meaning in (names.LOADER, names.COMPILATION):
        for lane in np.unique(trace.lane[host.meaning == meaning]):
            held = inside(host.union(meaning, lane), trace.start)
            counted &= ~(held & (trace.lane == lane) & ~talk)
            held = inside(host.union(meaning, lane), between[0])
            keep = ~(held & (trace.lane[within] == lane))
            within, between = within[keep], [edge[keep] for edge in between]
    device = np.flatnonzero(counted)
    own = _optimizer_ranges(trace, trace.start[device], work[device])
    kinds = _optimizer_ranges(trace, between[0], work[within])
    kinds = np.concatenate([own, kinds])
    starts = np.concatenate([trace.start[device], between[0]])
    ends = np.concatenate([trace.end[device], between[1]])
    unions = {
        part: merge(starts[kinds == CODE[part]], ends[kinds == CODE[part]])
        for part in names.WORK
    }
    edges = [np.array(trace.window, np.int64)]
    edges += [edge for union in unions.values() for edge in union]
    for meaning in (names.LOADER, names.COMPILATION, names.ACTIVE):
        edges += list(host.union(meaning))
    bounds = np.unique(np.concatenate(edges))
    bounds = bounds[(bounds >= trace.window[0]) & (bounds <= trace.window[1])]
    points = bounds[:-1]
    silent = ~inside(host.union(names.ACTIVE), points)
    owner = np.full(len(points), CODE["idle_host"])
    owner[host.unseen(silent, bounds)] = CODE["idle_unknown"]
    for part in ("communication", *reversed(names.COMPUTE)):
        owner[inside(unions[part], points)] = CODE[part]
    compiling = inside(host.union(names.COMPILATION), points)
    waiting = inside(host.union(names.LOADER), points)
    free = owner >= CODE["idle_loader"]
    owner[free & compiling] = CODE["idle_compilation"]
    owner[free & waiting] = CODE["idle_loader"]
    begins, ends = runs(silent, bounds)
    python = silent & (owner == CODE["idle_host"])
    python &= ends - begins > PYTHON_GAP_NS
    python = merge(bounds[:-1][python], bounds[1:][python])
    bounds, owner = _joined(bounds, owner)
    return Account(
        bounds=bounds,
        owner=owner,
        unions=unions,
        on_gpu=False,
        gpu=device,
        work=own,
        lanes=host.lanes,
        launch=np.full(len(device), -1),
        sync={},
        loader=host.union(names.LOADER),
        uploading=_NONE,
        steps=host.steps,
        queued=(_EMPTY, *_NONE),
        python=python,
        allocating=_NONE,
        between=(within, kinds[len(own) :], *between),
    )


def _least_ns(trace):
    """Return per event how long it must be to count as work.

    Where most operators of a name are tiny, a long one was interrupted.
    """
    lengths = trace.end - trace.start
    order = np.lexsort((lengths, trace.name))
    first = np.searchsorted(trace.name[order], np.arange(len(trace.names)))
    counts = np.bincount(trace.name, minlength=len(trace.names))
    at = np.minimum(first + counts // 2, len(order) - 1)
    tiny = lengths[order[at]] < TINY_OPERATOR_NS
    return TINY_OPERATOR_NS * np.where(tiny, 4, 1)[trace.name]


def of_gpu_job(trace):
    """Say whether a trace without GPU events is of a program on a device."""
    if trace.header.get("deviceProperties"):
        return True
    if (trace.kind == names.RUNTIME).any():
        return True
    if any(said["kind"] == "unknown-device" for said in trace.warnings):
        return True
    return any(
        n.startswith(("nccl:", "record_param_comms")) for n in trace.names
    )


def _optimizer_ranges(trace, starts, own):
    """Count element-wise work that begins in Optimizer.step as its own."""
    union = optimizing(trace)
    plain = own == CODE["elementwise"]
    held = inside(union, starts)
    return np.where(plain & held, CODE["optimizer"], own)


def _leaves(trace, chosen):
    """Say of each event whether no other chosen one is inside it."""
    hosts = (trace.kind == names.OPERATOR) | (trace.kind == names.RANGE)
    operators = np.flatnonzero(hosts & chosen)
    leaf = np.zeros(len(trace.start), bool)
    order = operators[
        np.lexsort(
            (
                -trace.end[operators],
                trace.start[operators],
                trace.lane[operators],
            )
        )
    ]
    if len(order):
        last = np.ones(len(order), bool)
        same = trace.lane[order][1:] == trace.lane[order][:-1]
        within = trace.start[order][1:] < trace.end[order][:-1]
        last[:-1] = ~(same & within)
        leaf[order] = last
    return leaf


def _between(trace, chosen):
    """Return what operators do themselves between those they call.

    A convolution's gradient copies its input and then computes; an operator
    that only hands over to the next is never silent for long.

    Returns:
        (events, starts, ends): of each long piece whose innermost operator
        is a chosen one.
    """
    hosts = (trace.kind == names.OPERATOR) & (trace.end > trace.start)
    mine = np.flatnonzero(hosts | chosen)
    if not chosen.any():
        return _EMPTY, *_NONE
    event = np.concatenate([mine, mine])
    opens = np.repeat([True, False], len(mine))
    at = np.where(opens, trace.start[event], trace.end[event])
    other = np.where(opens, trace.end[event], trace.start[event])
    order = np.lexsort((-other, opens, at, trace.lane[event]))
    event, opens, at = event[order], opens[order], at[order]
    lane = trace.lane[event]
    depth = np.cumsum(np.where(opens, 1, -1))
    long = np.diff(at, append=0) >= OWN_WORK_NS
    long[:-1] &= lane[1:] == lane[:-1]
    long[-1:] = False
    long = np.flatnonzero(long & (depth > 0))
    owner = np.full(len(long), -1)
    for level in np.unique(depth[long]).tolist():
        begun = np.flatnonzero(opens & (depth == level))
        these = depth[long] == level
        last = np.searchsorted(begun, long[these], side="right") - 1
        owner[these] = event[begun[last]]
    kept = chosen[owner] & (owner >= 0)
    # events that overlap, and are not inside each other, own nothing here
    kept &= trace.end[owner] >= at[long + 1]
    return owner[kept], at[long[kept]], at[long[kept] + 1]
