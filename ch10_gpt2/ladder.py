"""10.1  The model · GPT 模型結構簡介
10.2  The machine · 實驗環境與機器配置
10.3.1  Baseline · 基準模型
10.3.2  Gradient accumulation · 使用跨批次梯度累加
10.3.3  Recomputation · 開啟即時重算前向張量
10.3.4  Memory-friendly optimizer · 使用顯示記憶體友善的最佳化器模式
10.3.5  Sharding: FSDP · 使用分散式方法降低顯示記憶體佔用—FSDP
10.3.6  Memory: summary · 顯示記憶體最佳化小結
10.4.1  Baseline · 基準模型
10.4.2  Batch size · 增加 BatchSize
10.4.3  Loader workers · 增加資料前置處理的平行度
10.4.4  Asynchronous copies · 使用非同步介面完成資料傳輸
10.4.5  Graph compilation · 使用計算圖最佳化
10.4.6  float16 mixed precision · 使用float16 混合精度訓練
10.4.7  Custom operator · （可選）使用自訂運算元
10.4.8  Many devices, one host · 使用單機多卡加速訓練
10.4.9  Many hosts · 使用多機多卡加速訓練
10.4.10  Speed: summary · 性能最佳化小結

Question  Which step makes GPT-2 smaller or faster on this machine, and by
          how much, with the losses to prove that it still is GPT-2?
Expect    what each step should give is printed before it is measured
Run       python -m ch10_gpt2.ladder [--smoke] [--save] [--only 10.4.5]
"""

import dataclasses
import importlib
import inspect
import itertools
import math
import platform
import statistics
import textwrap
import time
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ch07_memory import training_memory
from ch10_gpt2 import log, predictions, train
from ch10_gpt2.journal import Book, alone_in, key, make_folder
from ch10_gpt2.race import (
    Plan,
    WorkerError,
    agreement,
    measure_memory,
    measured,
    race,
    start,
)
from ch10_gpt2.sizes import size
from ch10_gpt2.steps import TOLERANCE, Step
from common import bench, gpt, judging, machine, tables, timers

SUMMARY = {
    "memory": ("10.3.6", "Memory: summary", "顯示記憶體最佳化小結"),
    "speed": ("10.4.10", "Speed: summary", "性能最佳化小結"),
}
CARDS = ("10.1", "10.2")
STEPS, DATA = "ch10_gpt2.steps", "embedded"
UNFINISHED = 3  # exit code: nothing was recorded, the same command goes on


def missing(step: Step, plan: Plan) -> str | None:
    """Say what this machine lacks for ``step``, or nothing."""
    device = plan.device
    for need in step.needs:
        if need == "accelerator" and device.type == "cpu":
            return (
                "needs a device with memory of its own; on a CPU the ids "
                "already are where they are used"
            )
        if need == "compiler":
            reason = train.cannot_compile(device)
            if reason:
                return reason
        if need == "glibc":
            if device.type != "cpu":
                return "the device's caching allocator does this by itself"
            if platform.libc_ver()[0] != "glibc":
                return "needs glibc's malloc; this system has another"
        if need == "custom operator":
            from ch09_advanced import custom_op

            reason = custom_op.available(device)
            if reason:
                return reason
        if need == "ranks":
            if not torch.distributed.is_available():
                return "this build of torch has no torch.distributed"
            if device.type == "cuda" and torch.cuda.device_count() < 2:
                return "needs two GPUs; this machine has one"
            if device.type == "mps":
                return "needs several devices; MPS is one"
            if device.type == "cuda" and step.hosts:
                return (
                    "needs two hosts; start it with the files in "
                    "ch10_gpt2/launch"
                )
    return None


class Counter(TorchDispatchMode):
    """Count the operators that reach a kernel."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operators(config: train.Config) -> int:
    """Count the operators of a forward and backward, on the meta device."""
    with torch.device("meta"):
        model = gpt.GPT(config.model(), train.ATTENTION[config.attention])
        ids = torch.zeros(1, config.context(), dtype=torch.long)
        with Counter() as counter:
            model(ids, ids).backward()
    return counter.count


def launch_seconds(device: torch.device) -> float:
    """Measure what an operator costs before it does anything."""
    tensor = torch.zeros(1, device=device)
    return timers.wall(lambda: tensor.add_(1), 1000, device)


def fault_seconds() -> float:
    """Measure what a fresh page of host memory costs at first touch."""
    size = 1 << 26
    kept = torch.empty(size, dtype=torch.uint8)
    again = timers.wall(lambda: kept.fill_(1), 3)
    fresh = timers.wall(
        lambda: torch.empty(size, dtype=torch.uint8).fill_(1), 3
    )
    return max(0.0, fresh - again) / (size / 4096)


def ceilings(plan: Plan) -> dict:
    """Return this machine's ceilings in the form that bounds need."""
    peaks = plan.ceilings
    return {
        "bytes_per_s": peaks["copy_bytes_per_s"],
        "host_to_device": peaks.get("host_to_device_bytes_per_s"),
        "flops": peaks["gemm_flops"],
        "launch_s": launch_seconds(plan.device),
        "fault_s": fault_seconds(),
        "world": plan.world,
        "shared_cores": plan.device.type == "cpu",
    }


def predict_speed(plan: Plan, step: Step, now, then, before: dict) -> dict:
    """Predict the step's ratio on this machine, before it is measured."""
    if step.bound is None:
        return {}
    seconds = before["seconds"]
    at = ceilings(plan) | {
        "operators": operators(now),
        "seconds": seconds,
        "data_s": before["data_s"],
    }
    saved, words = step.bound(now, then, at)
    if saved is None:
        return {"predicted": words}
    ratio = seconds / max(seconds - saved, 0.05 * seconds)
    said = f"about {ratio:.2f}×"
    if saved >= seconds:
        said = f"more than the whole update, counted as {ratio:.2f}×"
    return {
        "predicted": f"{said}: {words}",
        "predicted_ratio": ratio,
    }


def predict_memory(plan: Plan, config: train.Config) -> dict:
    """Predict the peak of one update with fake tensors, by category."""
    world = plan.ranks_of(config)
    micro = config.sequences // (config.micro_batch * world)
    return training_memory.predict(
        config.model(),
        micro_batch=config.micro_batch,
        T=config.context(),
        attention=train.ATTENTION[config.attention],
        run_block=train.RECOMPUTE[config.recompute],
        optimizer=config.optimizer,
        accumulate=micro,
        world=world,
        fsdp=config.parallel == "fsdp",
        dtype=config.precision,
    )


def sums_up(step: Step) -> bool:
    """Say whether this is a track's last row: not a step of its own."""
    return step.section in [section for section, _, _ in SUMMARY.values()]


def empty_row(step: Step, **values) -> dict:
    """Return a row with every key of the log, nothing measured yet."""
    return {
        "track": step.track,
        "section": step.section,
        "step": "summary" if sums_up(step) else step.name,
        "title": step.title,
        "title_zh": step.title_zh,
        "why": step.why,
        "verdict": "not-applicable",
        "reason": "",
        "predicted": "",
        "predicted_ratio": None,
        "tokens_per_s": None,
        "previous_tokens_per_s": None,  # in the same turns
        "spread": None,
        "ratio_previous": None,
        "ratio_interval": None,
        "ratio_first": None,
        "peak_bytes": {},
        "categories": None,
        "loss": None,
        "losses": [],
        "agreement": None,
        "config": None,
        "trace": None,
        "wall_s": 0.0,
    } | values


def judge(step: Step, row: dict, before: dict) -> tuple[str, str]:
    """Keep what agrees and helps; say why in one sentence."""
    if not row["agreement"]["holds"]:
        a = row["agreement"]
        return "failed", (
            f"the losses differ by {a['worst']:.2g}, the first gradient "
            f"norm by {a['worst_gradient_norm']:.2g} and that of "
            f"{a['parameter'] or 'every parameter'} by "
            f"{a['worst_parameter_norm']:.2g} (declared {a['declared']}: "
            f"{a['tolerance']:g}, {a['gradient_tolerance']:g} and "
            f"{a['parameter_tolerance']:g}): this step does not compute the "
            "same thing"
        )
    value, interval = row["ratio_previous"], row["ratio_interval"]
    ratio = f"{value:.2f}× {log.interval(row)}".rstrip()
    if not interval:  # not in turns: only a large difference says anything
        interval = value / 1.1, value * 1.1
        ratio += " (one after the other: memory does not hold both)"
    if row["smoke"]:
        if {"compiler", "ranks"} & set(step.needs):
            return "reverted", (
                "it computes the same; a smoke run does not carry on what "
                "every later row would compile or launch again"
            )
        return "kept", "it computes the same; a smoke run judges no more"
    if step.track == "memory":
        kind, peak = log.main_peak(row) or (None, 0)
        old = before["peak_bytes"].get(kind)
        if not old:
            return "reverted", "no peak could be measured on this device"
        saved = 1 - peak / old
        price = f"at {ratio} of the speed before"
        if saved > 0.01:
            return "kept", f"peak {-saved:+.0%} ({kind}) {price}"
        return "reverted", f"peak {-saved:+.1%} ({kind}) {price}"
    if step.hosts:  # loopback or a virtual cable: no host was added
        return "reverted", (
            f"{ratio} with one machine standing in for two hosts: it shows "
            "that the launch works and computes the same, not what a second "
            "host is worth; for real ones see ch10_gpt2/launch"
        )
    steady = row.get("steady") is not False
    differs, words = judging.verdict(value, interval, steady)
    if not differs:
        return "reverted", f"{words.partition(':')[0]}: {ratio}"
    if value > 1:
        return "kept", f"faster: {ratio}"
    return "reverted", f"slower here: {ratio}"


def pilot(plan: Plan, step: Step, track: str, now: list, then: list) -> dict:
    """Time one sequence both ways; return the row's figures if hopeless."""
    worker = plan.worker(step, 1)
    try:
        old, new = (
            worker.ask(**plan.order("pilot", track, applied))
            for applied in (now, then)
        )
    except BaseException:
        worker.close()
        raise
    plan.release(worker)
    ratio = old["seconds"] / new["seconds"]
    if ratio > 0.7:
        return {}
    worst = abs(old["loss"] - new["loss"]) / abs(old["loss"])
    tokens = plan.configure(track, now).context()
    return {
        "verdict": "reverted",
        "reason": (
            f"a pilot of one sequence ran at {ratio:.2f}×: this CPU has no "
            "matrix unit for the format and emulates it"
            if plan.device.type == "cpu"
            else f"a pilot of one sequence ran at {ratio:.2f}×"
        ),
        "tokens_per_s": tokens / new["seconds"],
        "previous_tokens_per_s": tokens / old["seconds"],
        "ratio_previous": ratio,
        "pilot": True,
        "loss": new["loss"],
        "agreement": {
            "declared": step.agreement,
            "tolerance": TOLERANCE[step.agreement],
            "worst": worst,
            "holds": worst <= TOLERANCE[step.agreement],
        },
    }


def remembered(row: dict) -> list[dict]:
    """Return the reports of a row's updates, as far as they were kept."""
    columns = row["losses"], row["gradient_norms"], row["parameter_norms"]
    return [
        {
            "loss": loss,
            "grad_norm": norm,
            "parameter_norms": norms,
            "skipped": not math.isfinite(norm),  # or it had not been kept
        }
        for loss, norm, norms in itertools.zip_longest(*columns)
    ]


def attempt(
    plan: Plan,
    step: Step,
    applied: list[str],
    before: dict | None,
    previous: Step | None,
    seconds: float,
    then: list[str] | None = None,
    alone: bool = False,
) -> dict:
    """Measure ``step`` against the row before it; return its row.

    Args:
        plan: what stays the same.
        step: what is tried.
        applied: the steps kept before.
        before: the row of the last of them; None starts a track.
        previous: that step.
        seconds: for the measurement.
        then: all steps of the new configuration, if not the obvious ones.
        alone: the device does not hold both configurations at once; compare
            with what was recorded in ``before``.
    """
    track = step.track
    then = [*applied, step.name] if then is None else then
    config = plan.configure(track, then)
    row = empty_row(step, config=train.as_dict(config), smoke=plan.smoke)
    if track == "memory":
        predicted = predict_memory(plan, config)
        row["categories"] = predicted["bytes"]
        peak = predicted["peak_bytes"]
        row["predicted"] = f"peak {peak / 2**20:.1f} MiB"
        if before is not None and before.get("predicted_bytes"):
            change = peak / before["predicted_bytes"] - 1
            row["predicted"] += f" ({change:+.0%})"
        row["predicted_bytes"] = peak
    elif before is not None:
        now = plan.configure(track, applied)
        row |= predict_speed(plan, step, now, config, before)
    if not alone and (before is not None or len(then) == 1):
        announce(row)
    if step.pilot and before is not None and not alone:
        hopeless = pilot(plan, step, track, applied, then)
        if hopeless:
            row |= hopeless
            row["ratio_first"] = row["ratio_previous"] * before["ratio_first"]
            return row
    pairs = [(step, track, then)]
    if before is not None and not alone:
        pairs.insert(0, (previous, track, applied))
    workers = start(plan, pairs)
    try:
        old, new = (None, *workers)[-2:]
        result = race(plan, old, new, seconds)
        row |= measured(plan, result, config)
        trace = plan.out / "traces" / f"{track}-{step.section}-{step.name}"
        trace = trace.with_name(trace.name + ".json.gz")
        if before is None:
            row |= {
                "verdict": "kept",
                "reason": "where the track starts",
                "ratio_first": 1.0,
            }
        else:
            known = result["old"] or remembered(before)
            row["agreement"] = agreement(
                step.agreement,
                known[: plan.updates],
                result["new"][: plan.updates],
            )
            if alone:
                ratio = row["tokens_per_s"] / before["tokens_per_s"]
                row["ratio_previous"] = ratio
            else:
                plan.release(workers.pop(0))
            row["ratio_first"] = row["ratio_previous"] * before["ratio_first"]
        row["peak_bytes"] = measure_memory(new, None if plan.smoke else trace)
        if before is not None:
            row["verdict"], row["reason"] = judge(step, row, before)
        if step.hosts:
            where = "two network namespaces" if plan.netns else "loopback"
            row["reason"] = f"two agents, {where}: {row['reason']}"
        if row["verdict"] == "kept" and trace.exists():
            row["trace"] = str(trace.relative_to(plan.out))
        else:
            trace.unlink(missing_ok=True)
    except BaseException:
        for worker in workers:
            worker.close()
        raise
    plan.release(workers.pop())
    return row


# --- climbing -----------------------------------------------------------


def try_step(
    plan: Plan,
    step: Step,
    applied: list[str],
    before: dict | None,
    previous: Step | None,
    seconds: float,
    then: list[str] | None = None,
) -> dict:
    """Attempt a step; what goes wrong becomes its verdict.

    Two configurations are alive at once; if memory ends, the new one gets
    it all to itself before it is blamed.
    """
    begun = time.monotonic()
    reason = missing(step, plan)
    if reason:
        return empty_row(step, reason=reason)
    row = None
    for alone in (False, True) if before else (False,):
        try:
            row = attempt(
                plan, step, applied, before, previous, seconds, then, alone
            )
            break
        except WorkerError as error:
            verdicts = {
                "out-of-memory": ("reverted", f"out of memory: {error}"),
                "refusal": ("not-applicable", str(error)),
            }
            verdict, reason = verdicts.get(error.kind, ("failed", str(error)))
            row = empty_row(step, verdict=verdict, reason=reason)
            if error.kind != "out-of-memory":
                break
    row["wall_s"] = round(time.monotonic() - begun, 1)
    plan.overheads.append(row["wall_s"] - seconds)
    return row


def wrapped(words: str) -> str:
    """Indent a sentence below its step, at most 100 columns wide."""
    margin = " " * 8
    return textwrap.fill(
        words,
        tables.WIDTH,
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )


def announce(row: dict) -> None:
    """Print what a step is and should bring, before it is measured."""
    print(f"{row['section']:8}{row['title']} ({row['step']})")
    if row["predicted"]:
        print(wrapped(f"predicted: {row['predicted']}"), flush=True)


def say(row: dict) -> None:
    """Print what came of a step."""
    tokens = f"{log.rates(row)} tok/s, " if row["tokens_per_s"] else ""
    if not row["tokens_per_s"]:
        announce(row)
    print(wrapped(f"{tokens}{row['verdict']}: {row['reason']}"), flush=True)


def row_seconds(plan: Plan, rows_left: int) -> float:
    """Divide what is left of the budget, less what rows cost besides."""
    left = plan.budget_s - (time.monotonic() - plan.begun)
    besides = statistics.median(plan.overheads or [2.0 if plan.smoke else 9.0])
    return max(2.0, left / max(1, rows_left) - besides)


def is_late(plan: Plan) -> bool:
    """Say whether the budget is used up, with some to spare."""
    spent = time.monotonic() - plan.begun
    return spent > 1.15 * plan.budget_s and not plan.smoke


def start_ahead(plan: Plan, book: Book, tracks: list[str]) -> None:
    """Let later rows of a smoke run import and compile beside earlier ones.

    What importing torch, torchrun and a first compilation cost is most of a
    smoke run, and most of it leaves a core idle.
    """
    for track in tracks if plan.shares else []:
        applied = []
        for step in plan.tracks()[track]:
            waits = book.row(track, step.name, step.section) is None
            if step.needs == ("compiler",):  # the worker says if there is none
                if waits:
                    plan.compile(step, [*applied, step.name])
            elif "compiler" in step.needs or missing(step, plan):
                continue
            elif "ranks" in step.needs:
                if waits:
                    plan.prepare(step)
            elif not step.pilot:
                applied.append(step.name)


def rows_until(steps: list[Step], until: str | None) -> int:
    """Count a track's rows up to a section; a whole one has a summary."""
    last = [i + 1 for i, step in enumerate(steps) if step.section == until]
    return last[-1] if last and last[-1] < len(steps) else len(steps) + 1


def climb(plan: Plan, track: str, book: Book, until: str | None, ahead: int):
    """Try the steps of one track in their order; keep what helps.

    Args:
        until: the last section to run.
        ahead: rows that wait behind this track, for the budget.
    """
    steps = plan.tracks()[track]
    ends = rows_until(steps, until)
    applied: list[str] = []
    before, holder = None, None
    for place, step in enumerate(steps):
        row = book.row(track, step.name, step.section)
        if row is None and before and is_late(plan):
            row = empty_row(
                step,
                reason=f"not reached in --budget {plan.budget_s:g} seconds: "
                "the same command goes on here",
                not_reached=True,
            )
            book.add(row)
            say(row)
        if row is None:
            left = ends - place + ahead
            row = try_step(
                plan, step, applied, before, holder, row_seconds(plan, left)
            )
            book.add(row)
            say(row)
        if row["verdict"] == "kept":
            applied, before, holder = [*applied, step.name], row, step
        elif before is None:
            smaller = "out of memory" in row["reason"]
            raise bench.Refusal(
                f"the {track} baseline did not run: {row['reason']}"
                + "; choose a smaller --preset or fewer --sequences" * smaller
            )
        if place + 1 == ends:
            return
    section = SUMMARY[track][0]
    if any(r.get("not_reached") for r in book.data["rows"]):
        return
    if book.row(track, "summary", section) is None:
        seconds = row_seconds(plan, 1 + ahead)
        row = summary(plan, steps, applied, holder, book, seconds)
        book.add(row)
        say(row)


def summary(plan, steps, applied, holder, book, seconds: float) -> dict:
    """Race the first against the last configuration, in turns."""
    track = holder.track
    section, title, title_zh = SUMMARY[track]
    first = book.row(track, steps[0].name, steps[0].section)
    kept = [s for s in steps if s.name in applied]
    agreements = [s.agreement for s in kept]
    weakest = max(agreements, key=list(TOLERANCE).index)
    step = dataclasses.replace(
        holder,
        section=section,
        title=title,
        title_zh=title_zh,
        agreement=weakest,
        pilot=False,
        bound=None,
    )
    if len(applied) == 1:
        row = empty_row(step, verdict="kept", reason="no step was kept")
    else:
        row = try_step(
            plan,
            step,
            applied[:1],
            first,
            steps[0],
            seconds,
            then=applied,
        )
        row["ratio_first"] = row["ratio_previous"]
        row["reason"] = "first against last: " + row["reason"]
    names = ", ".join(s.name for s in kept)
    return row | {
        "why": f"The first configuration and the last in turns: {names}.",
    }


# --- the command line ---------------------------------------------------


def flags(parser) -> None:
    """Add what only the ladder needs."""
    add = parser.add_argument
    add("--track", choices=("memory", "speed"), help="one of the two tracks")
    add("--only", metavar="SECTION", help="one section, e.g. 10.4.5")
    add("--until", metavar="SECTION", help="stop after this section")
    add("--diff", metavar="STEP", help="show a step's source (or 'list')")
    add("--preset", help=f"model: {', '.join(gpt.PRESETS)}")
    add("--data", default=DATA, help="text (see common/text.py)")
    add("--sequences", type=int, help="sequences per optimizer update")
    add("--budget", type=float, help="seconds for the whole log")
    add("--out", type=Path, help="folder of the log")
    add("--restart", action="store_true", help="begin the log anew")
    add("--predict", action="store_true", help="recompute the predictions")
    add("--netns", action="store_true", help="10.4.9 in two namespaces")
    add(
        "--steps",
        default=STEPS,
        metavar="MODULE",
        help="module with the lists MEMORY and SPEED",
    )


def refuse_another(args, **asked: bool) -> None:
    """Refuse to record another log in the place of this machine's own.

    Args:
        args: the flags.
        asked: by the name of a flag, whether it asks for another log.
    """
    flags = [f"--{name}" for name, another in asked.items() if another]
    if args.save and flags:
        raise bench.Refusal(
            f"--save with {', '.join(flags)}: the record is of both tracks "
            "at the size that suits this machine, and this would take its "
            "place; leave out --save (the log stays in its folder) or the "
            "rest"
        )


def make_plan(args) -> Plan:
    """Read the flags into what stays the same through both tracks."""
    device = args.device
    own = size(device, args.smoke)
    preset, sequences = args.preset or own.preset, own.sequences
    name = f"{device.type}-{preset}" + ("-smoke" if args.smoke else "")
    world = torch.cuda.device_count() if device.type == "cuda" else 2
    world = max(2, world)
    sequences += -sequences % world  # each rank has its share
    usual = sequences
    if args.sequences is not None:
        if args.sequences < 1:
            raise bench.Refusal("--sequences must be at least 1")
        if args.sequences % world:
            raise bench.Refusal(
                f"--sequences {args.sequences}: must be a multiple of "
                f"{world}, the ranks that share an update in 10.3.5 and 10.4.8"
            )
        sequences = args.sequences
    if args.budget is not None and not args.budget > 0:
        raise bench.Refusal(f"--budget {args.budget}: give seconds above 0")
    base = {
        "preset": preset,
        "data": args.data,
        "device": str(device),
        "sequences": sequences,
        "steps": 200,
        "warmup": 2,
        "lr": 1e-3,
    }
    base["T"] = own.T if preset == own.preset else None
    another = {"preset": preset != own.preset}
    another["sequences"] = sequences != usual
    refuse_another(args, **another)
    try:
        module = importlib.import_module(args.steps)
        module.MEMORY, module.SPEED  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise bench.Refusal(
            f"--steps {args.steps}: not a module with the lists MEMORY and "
            f"SPEED ({error})"
        ) from None
    plan = Plan(
        base=base,
        steps=args.steps,
        smoke=args.smoke,
        # two workers of all threads each would wait for each other
        threads=1 if args.smoke else torch.get_num_threads(),
        world=world,
        netns=args.netns,
        budget_s=own.budget_s if args.budget is None else args.budget,
        why="as the flags ask" if any(another.values()) else own.why,
        out=args.out or Path("runs") / f"ladder-{name}",
        ceilings=machine.peaks(device),
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what measuring them took
    for track, steps in plan.tracks().items():
        plan.configure(track, [steps[0].name])  # refuses what cannot be
    if args.only:
        plan.out = plan.out / f"only-{args.only}"
    return plan


def tracks_until(plan: Plan, track: str | None, until: str | None) -> list:
    """Return the tracks to climb: up to the one that holds ``until``."""
    chosen = [track] if track else ["memory", "speed"]
    if until is None:
        return chosen
    for place, name in enumerate(chosen):
        if until in [s.section for s in plan.tracks()[name]]:
            return chosen[: place + 1]
    raise bench.Refusal(
        f"--until {until}: no such section in {' or '.join(chosen)}; "
        "--diff list shows them"
    )


def recorded_predictions() -> dict:
    """Return the predictions for the book's own case, if they are there."""
    try:
        return predictions.load()
    except bench.Refusal as refusal:
        print(f"without predictions: {refusal}")
        return {}


def resolve(name: str):
    """Return what a step ``shows``: a function of the trainer, or anywhere."""
    module, _, name = name.rpartition(":")
    return getattr(importlib.import_module(module or train.__name__), name)


def show_difference(args) -> None:
    """Print a step's source, and the trainer's functions it turns on."""
    module = importlib.import_module(args.steps)
    every = module.MEMORY + module.SPEED
    chosen = [s for s in every if args.diff in (s.name, s.section)]
    for step in chosen:
        print(inspect.getsource(step.change))
        for name in step.shows:
            shown = resolve(name)
            print(f"# {inspect.getmodule(shown).__name__}")
            print(inspect.getsource(shown))
    if chosen:
        return
    names = "".join(f"\n  {s.section:8}{s.name}" for s in every)
    if args.diff != "list":
        raise bench.Refusal(f"--diff {args.diff}: no such step; known:{names}")
    print(names)


def one_section(plan: Plan, section: str, book: Book) -> None:
    """Run the steps of one section on top of all that come before it."""
    for track, steps in plan.tracks().items():
        if section == SUMMARY[track][0]:
            climb(plan, track, book, None, 0)
            return
        for place, step in enumerate(steps):
            if step.section != section:
                continue
            earlier = [
                s
                for s in steps[:place]
                if s.section != section
                and not s.pilot
                and missing(s, plan) is None
                and not (s.needs and "ranks" in s.needs)
            ]
            names = [s.name for s in earlier]
            before, holder = None, None
            if earlier:
                holder = earlier[-1]
                before = try_step(
                    plan, holder, names[:-1], None, None, 1.0, then=names
                )
                if before["verdict"] != "kept":
                    book.add(before)
                    say(before)
                    return
            seconds = row_seconds(plan, 1) / 2
            row = try_step(plan, step, names, before, holder, seconds)
            book.add(row)
            say(row)


def main(argv=None) -> list[dict]:
    """Run the log; return its rows.

    Raises:
        SystemExit: with code 1 when a step failed; else with 3 when
            ``--save`` recorded nothing, because the budget ended before the
            last row: the same command goes on.
    """
    args = bench.cli(__doc__, argv, add=flags)
    if args.diff:
        show_difference(args)
        return []
    if args.predict:
        words = ["--smoke"] * args.smoke + ["--save"] * args.save
        return predictions.main(words)
    refuse_another(
        args,
        only=bool(args.only),
        track=bool(args.track),
        until=bool(args.until),
        steps=args.steps != STEPS,
        data=args.data != DATA,
    )
    if args.only in CARDS:
        own = size(args.device, args.smoke)
        same = args.preset in (None, own.preset)
        config = train.Config(
            preset=args.preset or own.preset, T=own.T if same else None
        )
        config.model()  # refuses an unknown name
        if args.only == "10.1":
            print(log.model_card(config.preset, config.context()))
        else:
            print(log.machine_card(args.device))
        return []
    plan = make_plan(args)
    config = train.Config(**plan.base)
    chosen = tracks_until(plan, args.track, args.until)
    if args.only:
        known = {s.section for t in plan.tracks().values() for s in t}
        known |= {section for section, _, _ in SUMMARY.values()}
        if args.only not in known:
            raise bench.Refusal(
                f"--only {args.only}: no such section here; known: "
                + ", ".join(sorted(known | set(CARDS)))
            )
    header = {
        "machine": machine.card(plan.device),
        "peaks": plan.ceilings,
        "source": machine.source(),
        "preset": plan.base["preset"],
        "sequences": plan.base["sequences"],
        "size": plan.why,
        "smoke": plan.smoke,
        "command": ["python", "-m", "ch10_gpt2.ladder", *args.argv],
        "model": log.model_facts(config.model(), config.context()),
        "key": key(plan),
        "predictions": recorded_predictions(),
    }
    make_folder(plan.out)
    with alone_in(plan.out):
        return write_log(args, plan, chosen, header)


def write_log(args, plan: Plan, chosen: list, header: dict) -> list[dict]:
    """Climb the chosen tracks, or run one section; write the log."""
    book = Book(plan, header, args.restart or bool(args.only))
    config = train.Config(**plan.base)
    print(machine.line(header["machine"]))
    print(
        f"{plan.base['preset']}: {plan.base['sequences']} sequences of "
        f"{config.context()} tokens per update; log in {plan.out}",
        flush=True,
    )
    try:
        if args.only:
            one_section(plan, args.only, book)
        elif not args.until:
            start_ahead(plan, book, chosen)
        for i, track in enumerate(chosen if not args.only else []):
            ahead = [
                rows_until(plan.tracks()[t], args.until)
                for t in chosen[i + 1 :]
            ]
            last = args.until if track == chosen[-1] else None
            climb(plan, track, book, last, sum(ahead))
    except (KeyboardInterrupt, SystemExit):
        done = len(book.data["rows"])
        if done:
            log.render(book.data, plan.out)
        again = "the same command goes on"
        if args.only or not done:
            again = "the same command begins anew"
        elif args.restart:
            again = "the same command without --restart goes on"
        print(f"stopped after {done} rows: {again}")
        raise
    finally:
        plan.close()
    rows = book.data["rows"]
    final = [r for r in rows if r["step"] == "summary" and r["config"]]
    if final:
        kept = final[-1]["config"]
        named = kept | {"out": f"runs/{plan.base['preset']}"}
        book.data["final"] = {
            "command": train.command_line(named, plan.world),
            "config": kept,
        }
    book.save()
    print(f"written: {log.render(book.data, plan.out)}")
    waiting = sum(bool(r.get("not_reached")) for r in rows)
    if args.save and waiting:
        print(
            f"nothing is recorded: {waiting} rows were not reached in "
            f"--budget {plan.budget_s:g} seconds; the same command goes on "
            "with them"
        )
    elif args.save:
        log.save(args, book.data, plan.out)
    if any(r["verdict"] == "failed" for r in rows):
        raise SystemExit(1)
    if args.save and waiting:
        raise SystemExit(UNFINISHED)
    return rows


if __name__ == "__main__":
    bench.run(main)
