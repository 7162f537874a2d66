"""4.1.3  GPU clocks · 控制GPU 頻率

Question  Which clock does the GPU run at, what limits it, and what does a
          locked clock change?
Expect    a product's time goes as 1 / graphics clock, a copy's hardly, since
          the memory has a clock of its own; locked below the power limit,
          both spread less
Run       python -m ch04_profiling.gpu_clocks [--smoke] [--save]
          python -m ch04_profiling.gpu_clocks --pin [MHZ]   (needs root)
"""

import statistics

import torch

from common import bench, gpu_clock, timers


def supported_clocks(nvml, gpu):
    """A GPU steps through a list of graphics clocks, one per memory clock.

    Returned is {memory MHz: (lowest, highest, steps)} of the graphics clock.
    """
    found = {}
    for memory in sorted(nvml.nvmlDeviceGetSupportedMemoryClocks(gpu)):
        clocks = nvml.nvmlDeviceGetSupportedGraphicsClocks(gpu, memory)
        found[memory] = min(clocks), max(clocks), len(clocks)
    return found


def limits(mask):
    """Heat, power or a request hold a clock down: NVML has a bit for each."""
    names = {
        0x1: "idle",
        0x2: "application clocks",
        0x4: "power limit",
        0x8: "hardware slowdown",
        0x10: "synchronised with other GPUs",
        0x20: "temperature, by software",
        0x40: "temperature, by hardware",
        0x80: "power brake from outside",
        0x100: "display clocks",
    }
    words = [name for bit, name in names.items() if mask & bit]
    rest = mask & ~sum(names)
    return ", ".join(words + [f"{rest:#x}"] * bool(rest)) or "nothing"


def clock_at_work(nvml, gpu, work, sync):
    """A GPU without work lowers its clock: read it while it is busy.

    Returned are (graphics MHz, memory MHz, mask of what limits it).
    """
    work()  # returns while the GPU goes on
    graphics = nvml.nvmlDeviceGetClockInfo(gpu, 0)
    memory = nvml.nvmlDeviceGetClockInfo(gpu, 2)
    mask = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
    sync()
    return graphics, memory, mask


TECHNIQUES = (supported_clocks, limits, clock_at_work)

COMMANDS = """\
nvidia-smi -q -d SUPPORTED_CLOCKS,CLOCK,PERFORMANCE   what there is, and now
sudo nvidia-smi -i 0 -lgc 1200,1200                   lock (no work needed)
sudo nvidia-smi -i 0 -rgc                             and always undo it"""


class Quiet:
    """Asks NVML; what a device or driver does not tell is None."""

    def __init__(self, nvml):
        self.nvml = nvml

    def __getattr__(self, name):
        def ask(*args):
            try:
                return getattr(self.nvml, name)(*args)
            except Exception:  # NVML's errors are made at run time
                return None

        return ask


def state_rows(nvml, gpu):
    """Return rows: what the device supports, and how it runs now."""
    ask = Quiet(nvml)
    try:
        clocks, untold = supported_clocks(nvml, gpu), {}
    except Exception as error:  # a laptop's or a virtual GPU has no list
        clocks, untold = {}, {"graphics": f"no list of clocks ({error})"}
    told = [f"{n} to {m} MHz in {k} steps" for n, m, k in clocks.values()]
    mask = ask.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
    watts = ask.nvmlDeviceGetPowerUsage(gpu)
    limit = ask.nvmlDeviceGetEnforcedPowerLimit(gpu)
    rows = {
        f"graphics, memory at {memory} MHz": text
        for memory, text in zip(clocks, told, strict=True)
    } | untold
    for name, kind in (("graphics", 0), ("memory", 2)):
        now = ask.nvmlDeviceGetClockInfo(gpu, kind)
        rows[f"{name} now"] = now and f"{now} MHz"
    rows["limited by"] = None if mask is None else limits(mask)
    rows["power"] = watts and limit and f"{watts // 1000} W"
    rows["power limit"] = limit and f"{limit // 1000} W"
    celsius = ask.nvmlDeviceGetTemperature(gpu, 0)
    rows["temperature"] = celsius and f"{celsius} °C"
    return [
        {"name": name, "value": value or "not told"}
        for name, value in rows.items()
    ]


def works(device, smoke):
    """Return {name: some tens of milliseconds of work} for a GPU."""
    n = 64 if smoke or device.type == "cpu" else 4096
    a = torch.ones(n, n, device=device)
    b, c = torch.empty_like(a), torch.ones(4 * n, n, device=device)
    d = torch.empty_like(c)
    return {
        "product": lambda: [torch.mm(a, a, out=b) for _ in range(5)],
        "copy": lambda: [d.copy_(c) for _ in range(10)],
    }


def timed(nvml, gpu, device, smoke):
    """Return {work: (seconds, IQR in %, clocks, mask)} at today's clock."""
    rounds, found = 5 if smoke else 20, {}

    def sync():
        timers.synchronize(device)

    for name, work in works(device, smoke).items():
        timers.wall(work, rounds, device)  # the clock rises with the work
        seen = clock_at_work(nvml, gpu, work, sync)
        times = [timers.wall(work, 1, device) for _ in range(rounds)]
        low, middle, high = statistics.quantiles(times, n=4)
        found[name] = middle, 100 * (high - low) / middle, *seen
    return found


def free_and_pinned(nvml, gpu, device, pin=None, smoke=False):
    """Return rows of both works with the clock free and, if asked, locked.

    The lock is undone on every way out: ``gpu_clock.pinned``. A lock that
    somebody else had set goes with it, since the driver keeps only one.
    """
    settings = {"free": timed(Quiet(nvml), gpu, device, smoke)}
    if pin is not None:
        with gpu_clock.pinned(device, pin or None, nvml) as held:
            print(held.reason)
            if held.locked:
                name = f"locked at {held.graphics_mhz} MHz"
                settings[name] = timed(Quiet(nvml), gpu, device, smoke)
    rows = []
    for name, found in settings.items():
        for work, (took, spread, graphics, memory, mask) in found.items():
            free = settings["free"][work]
            expected = None
            if graphics and free[2]:
                expected = free[2] / graphics if work == "product" else 1.0
            rows.append(
                {
                    "name": work,
                    "clock": name,
                    "graphics_mhz": graphics,
                    "memory_mhz": memory,
                    "limited": None if mask is None else limits(mask),
                    "median_s": took,
                    "iqr_percent": spread,
                    "times": took / free[0],
                    "expected_times": expected,
                }
            )
    return rows


def add(parser):
    parser.add_argument(
        "--pin",
        nargs="?",
        type=int,
        const=0,
        metavar="MHZ",
        help="lock the graphics clock while measuring (3/4 of the highest)",
    )


def found_gpu(device, nvml=None):
    """Return (NVML, handle), or (None, a sentence that says why not)."""
    if torch.version.hip:
        return None, "an AMD GPU: NVML is NVIDIA's; see rocm-smi --showclocks"
    try:
        if nvml is None:
            import pynvml as nvml
        nvml.nvmlInit()
        return nvml, gpu_clock.handle(nvml, device)
    except ImportError:
        return None, "nvidia-ml-py is not installed (requirements.txt)"
    except Exception as error:
        return None, f"no NVIDIA GPU or driver here ({error})"


def main(argv=None, nvml=None):
    args = bench.cli(__doc__, argv, add)
    given = nvml is not None
    nvml, gpu = found_gpu(args.device, nvml)
    if nvml is None:
        rows = bench.report(
            args,
            [{"name": "NVML", "value": gpu}],
            {"name": "asked", "value": "answer"},
        )
        print("on a machine with one, by hand:", COMMANDS, sep="\n")
        if args.pin is not None:
            print("--pin: nothing was locked")
        bench.left_out(args, "all of it: clocks of a GPU need a GPU")
        return rows
    try:
        rows = bench.report(
            args,
            state_rows(nvml, gpu),
            {"name": "clock", "value": "says"},
            title="What the GPU supports, and how it runs now",
        )
        if args.device.type != "cuda" and not given:
            bench.left_out(args, "the measurements: --device is not a GPU")
            return rows
        rows += bench.report(
            args,
            free_and_pinned(nvml, gpu, args.device, args.pin, args.smoke),
            {
                "name": "work",
                "clock": "clock",
                "graphics_mhz": "MHz at work",
                "median_s": "median",
                "iqr_percent": "IQR %",
                "times": "time / free",
                "expected_times": "expected",
                "limited": "limited by",
            },
            title="At work",
        )
        if args.pin is None:
            print("nothing was changed; --pin locks the clock, or by hand:")
            print(COMMANDS)
        return rows
    finally:
        Quiet(nvml).nvmlShutdown()


if __name__ == "__main__":
    bench.run(main)
