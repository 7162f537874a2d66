"""4.1.4  CPU states · 控制CPU 的性能狀態和工作頻率

Question  Which governor, turbo and sleep states does this CPU run with, and
          what do they do to the first work after a pause?
Expect    the longer the pause, the deeper the core sleeps and the lower its
          clock: work then takes longer than the same work without a pause.
          With the performance governor, or kept awake, much less so
Run       python -m ch04_profiling.cpu_clocks [--smoke] [--save]
          python -m ch04_profiling.cpu_clocks --governor performance
          --no-turbo --awake      (need root; undone at the end)
"""

import contextlib
import platform
import signal
import struct
import sys
import time
from pathlib import Path

from common import bench, tables

try:
    import psutil
except ImportError:  # the frequency is then unknown outside Linux
    psutil = None

SYSFS = Path("/sys/devices/system/cpu")
LATENCY = Path("/dev/cpu_dma_latency")
TURBO = {  # the file, and what turns it off
    "intel_pstate/no_turbo": "1",
    "cpufreq/boost": "0",
    "cpu[0-9]*/cpufreq/boost": "0",
}


def cpu_states(root):
    """Linux keeps a CPU's states as files: what can be set is written there.

    Returned is {what: value} of the first CPU, without what has no file.
    """

    def text(*names):
        for name in names:
            try:
                return (root / name).read_text().strip()
            except OSError:  # not there, or not for us
                pass

    files = {
        "driver": ["cpu0/cpufreq/scaling_driver"],
        "governors": ["cpu0/cpufreq/scaling_available_governors"],
        "preference": ["cpu0/cpufreq/energy_performance_preference"],
        "no_turbo": ["intel_pstate/no_turbo"],
        "boost": ["cpufreq/boost", "cpu0/cpufreq/boost"],
        "sleep_driver": ["cpuidle/current_driver"],
        "smt": ["smt/control"],
    }
    found = {name: text(*paths) for name, paths in files.items()}
    return {name: value for name, value in found.items() if value}


def per_cpu(root, name):
    """Each CPU has a file of its own: they need not agree.

    Returned is {value: [CPUs]}, for example {"powersave": [0, 1]}.
    """
    found = {}
    for folder in root.glob("cpu[0-9]*"):
        try:
            value = (folder / name).read_text().strip()
        except OSError:
            continue
        found.setdefault(value, []).append(int(folder.name[3:]))
    return {value: sorted(cpus) for value, cpus in sorted(found.items())}


def sleep_states(root, cpu=0):
    """An idle core sleeps; the deeper, the longer it takes to wake up.

    Returned are rows in order: name, latency in seconds, entries so far.
    """
    rows = []
    folders = (root / f"cpu{cpu}" / "cpuidle").glob("state[0-9]*")
    for folder in sorted(folders, key=lambda path: int(path.name[5:])):
        try:
            name, latency, entered, off = (
                (folder / file).read_text().strip()
                for file in ("name", "latency", "usage", "disable")
            )
        except OSError:
            continue
        row = {"name": name, "latency_s": int(latency) / 1e6}
        rows.append(row | {"entered": int(entered), "disabled": off != "0"})
    return rows


def after_pause(work, pause_s, repeats, clock, sleep):
    """A core that slept wakes up, at a low clock, when work comes.

    Returned is the median time of the first work after each pause.
    """
    times = []
    for _ in range(repeats):
        if pause_s:
            sleep(pause_s)
        start = clock()
        work()
        times.append(clock() - start)
    return sorted(times)[len(times) // 2]


TECHNIQUES = (cpu_states, per_cpu, sleep_states, after_pause)


@contextlib.contextmanager
def held(wanted):
    """Write {path: text} for the block, and write back what was there.

    A setting of the kernel outlives its process, so it is undone on every
    way out: the block's end, an exception, Ctrl-C and SIGTERM, of which a
    second one waits until all is undone. Only a main thread can do this.
    """
    before, told, failed = {}, [], []

    def end(number, frame):
        told.append(number)
        if len(told) == 1:
            raise KeyboardInterrupt

    ends = signal.SIGINT, signal.SIGTERM
    handlers = {number: signal.signal(number, end) for number in ends}
    try:
        for path, text in wanted.items():
            before[path] = path.read_text()  # noted before it is changed
            path.write_text(text)
        yield
    finally:
        told.append(None)  # from here on a signal is only noted
        for path, text in reversed(before.items()):
            try:
                path.write_text(text)
            except OSError as error:
                failed.append(f"{path} was {text.strip()!r} ({error})")
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for sentence in failed:
            print(f"NOT UNDONE: {sentence}", file=sys.stderr)
        for number in filter(None, told):
            signal.raise_signal(number)  # to whom it concerned before


@contextlib.contextmanager
def awake(device=LATENCY):
    """Ask for wake-ups within 0 µs: idle cores spin instead of sleeping.

    It holds while the file is open. The kernel closes it even after SIGKILL.
    """
    with open(device, "wb", buffering=0) as file:
        file.write(struct.pack("i", 0))
        yield


def wanted_files(args, root):
    """Return {file: text} for the flags, or refuse in one sentence."""
    wanted, states = {}, cpu_states(root)
    if args.governor:
        names = states.get("governors", "").split()
        if args.governor not in names:
            there = ", ".join(names) or "none that can be chosen (a guest?)"
            raise bench.Refusal(
                f"--governor {args.governor}: this CPU has {there}"
            )
        for path in sorted(root.glob("cpu[0-9]*/cpufreq/scaling_governor")):
            wanted[path] = args.governor
    if args.no_turbo:
        for pattern, off in TURBO.items():
            found = sorted(root.glob(pattern))
            if found:
                wanted |= dict.fromkeys(found, off)
                break
        else:
            raise bench.Refusal("--no-turbo: this CPU has no file for it")
    return wanted


def commands(states, governors, system):
    """Return rows: what to type to change a state, and to undo it."""
    if system == "Darwin":
        line = "sudo pmset -a lowpowermode"
        return [{"do": f"{line} 0", "undo": f"{line} 1"}]
    if system == "Windows":
        line = "powercfg /setactive SCHEME_"
        return [{"do": f"{line}MIN", "undo": f"{line}BALANCED"}]
    rows = []
    if governors:
        line, was = "sudo cpupower frequency-set -g ", next(iter(governors))
        rows.append({"do": f"{line}performance", "undo": line + was})
    for name, file, off in (
        ("no_turbo", "intel_pstate/no_turbo", "1"),
        ("boost", "cpufreq/boost", "0"),
    ):
        if name in states:
            line = "echo {} | sudo tee " + f"{SYSFS}/{file}"
            change = line.format(off), line.format(states[name])
            rows.append(dict(zip(("do", "undo"), change, strict=True)))
    if "sleep_driver" in states and states["sleep_driver"] != "none":
        line = "sudo cpupower idle-set "
        rows.append({"do": f"{line}--disable-by-latency 10"})
        rows[-1]["undo"] = f"{line}--enable-all"
    return rows


def state_rows(root):
    """Return rows: what runs now, as far as this system tells."""
    rows = dict(cpu_states(root))
    listed = {"governor": "scaling_governor", "MHz now": "scaling_cur_freq"}
    listed |= {"MHz from": "scaling_min_freq", "MHz to": "scaling_max_freq"}
    for name, file in listed.items():
        found = per_cpu(root, f"cpufreq/{file}")
        if name.startswith("MHz"):
            found = sorted(int(khz) // 1000 for khz in found if khz.isdigit())
            ends = dict.fromkeys([*found[:1], *found[-1:]])
            found = " to ".join(str(mhz) for mhz in ends)
        else:
            found = ", ".join(f"{v} ({len(c)} CPUs)" for v, c in found.items())
        if found:
            rows[name] = found
    if "MHz now" not in rows:
        with contextlib.suppress(Exception):  # not on every ARM
            rows["MHz now"] = f"{psutil.cpu_freq().current:.0f} (psutil)"
    for state in sleep_states(root):
        off = ", disabled" if state["disabled"] else ""
        rows[f"sleep state {state['name']}"] = (
            f"wakes up in {tables.seconds(state['latency_s'])}, entered "
            f"{state['entered']} times{off}"
        )
    return [{"name": n.replace("_", " "), "value": v} for n, v in rows.items()]


def pauses(args, setting):
    """Return rows: the same work after longer and longer pauses."""
    count, rows = 200 if args.smoke else 20_000, []
    for pause_s in (0, 1e-3, 1e-2, 0.1):
        repeats = 3 if args.smoke else round(min(200, 1 / (pause_s or 1e-3)))
        took = after_pause(
            lambda: sum(range(count)),
            pause_s,
            repeats,
            time.perf_counter,
            time.sleep,
        )
        name = f"{setting}, after {tables.seconds(pause_s)}"
        row = {"name": name, "setting": setting, "pause_s": pause_s}
        rows.append(row | {"work_s": took})
        rows[-1]["times"] = took / rows[0]["work_s"]
    return rows


def add(parser):
    parser.add_argument("--governor", help="hold it while measuring (root)")
    for flag, what in (
        ("--no-turbo", "hold turbo off while measuring (root)"),
        ("--awake", "keep cores from sleeping while measuring (root)"),
    ):
        parser.add_argument(flag, action="store_true", help=what)


def main(argv=None, root=SYSFS, latency=LATENCY):
    args = bench.cli(__doc__, argv, add)
    wanted = wanted_files(args, root)
    rows = bench.report(
        args,
        state_rows(root) or [{"name": "CPU states", "value": "not told"}],
        {"name": "state", "value": "now"},
        title="What this CPU runs with",
    )
    system = platform.system()
    if not per_cpu(root, "cpufreq/scaling_governor"):
        who = "a guest's host, or firmware," if system == "Linux" else system
        print(f"no governor to choose here: {who} decides")
    measured = pauses(args, "as found")
    if wanted or args.awake:
        words = [args.governor, args.no_turbo and "no turbo"]
        words += [args.awake and "awake"]
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(held(wanted))
                if args.awake:
                    stack.enter_context(awake(latency))
                measured += pauses(args, ", ".join(filter(None, words)))
        except OSError as error:
            raise bench.Refusal(
                f"{error.filename or 'a CPU state'} cannot be set "
                f"({error.strerror}): it takes root and a machine of one's "
                "own; all is as before"
            ) from None
    measured = bench.report(
        args,
        measured,
        {
            "setting": "setting",
            "pause_s": "pause before",
            "work_s": "the work takes",
            "times": "/ without a pause",
        },
        title="The first work after a pause",
    )
    if system == "Linux" and not sleep_states(root):
        print(
            "no sleep state is shown: who decides how deep these cores sleep "
            "may keep\nthem awake, and then a pause costs nothing here, "
            "unlike on cores of your own"
        )
    found = commands(
        cpu_states(root), per_cpu(root, "cpufreq/scaling_governor"), system
    )
    if found:
        print(tables.table(found, {"do": "to change it", "undo": "to undo"}))
    if not (wanted or args.awake):
        print("nothing was changed")
    return rows + measured


if __name__ == "__main__":
    bench.run(main)
