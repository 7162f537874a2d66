"""4.3.1  torch.profiler · 性能分析

Question  Which operators does a training step spend its time in, how often
          does it call them, with which shapes, and for how many FLOPs?
Expect    of L layers, each C → C on B samples: L addmm forwards and 2 L − 1
          mm backwards (the first input needs no gradient) of 2 B C² FLOPs
          each; ranges of our own once per recorded step, and nothing of the
          steps that the schedule leaves out
Run       python -m ch04_profiling.profile_ops [--smoke] [--save]
"""

import os

import torch

from common import bench, seeding

RANGES = ("forward", "backward", "update")
WAIT, WARM_UP = 2, 1  # steps before the profiler records


def profiled(step, wait, warm_up, active):
    """A profiler costs time itself: it rests, warms up, and then records.

    The first steps of a program are not like the others, nor is the first
    that is recorded: both are run, and left out.
    """
    with torch.profiler.profile(
        activities=torch.profiler.supported_activities(),
        schedule=torch.profiler.schedule(
            wait=wait, warmup=warm_up, active=active, repeat=1
        ),
        record_shapes=True,
        with_flops=True,
    ) as profile:
        for _ in range(wait + warm_up + active):
            step()
            profile.step()
    return profile


def named_step(model, optimizer, inputs):
    """A range gives the operators inside it a name of the program's own."""
    with torch.profiler.record_function("forward"):
        loss = model(inputs).square().mean()
    with torch.profiler.record_function("backward"):
        loss.backward()
    with torch.profiler.record_function("update"):
        optimizer.step()
        optimizer.zero_grad()


def operators(profile, steps, by_shape=False):
    """An operator calls others: only time outside them adds up to the step.

    Returns rows (name, shapes, calls, self_s, total_s, work) per step, by
    falling self time: of the GPU, where there is one.  ``work`` is in FLOPs.
    """
    rows = []
    for event in profile.key_averages(group_by_input_shape=by_shape):
        on_gpu = event.self_device_time_total > 0
        own = event.self_device_time_total
        whole = event.device_time_total
        if not on_gpu:
            own, whole = event.self_cpu_time_total, event.cpu_time_total
        row = {"name": event.key, "on_gpu": on_gpu}
        row["shapes"] = [s for s in event.input_shapes or [] if s]
        row["calls"] = event.count / steps
        row["self_s"], row["total_s"] = own / 1e6 / steps, whole / 1e6 / steps
        row["work"] = round((event.flops or 0) / steps)
        rows.append(row)
    return sorted(rows, key=lambda row: (-row["on_gpu"], -row["self_s"]))


TECHNIQUES = (profiled, named_step, operators)


def sizes(args):
    """Return (samples B, width C, layers L, recorded steps)."""
    if args.smoke:
        return 16, 32, 2, 2
    if args.device.type == "cpu":
        return 256, 512, 4, 5
    return 8192, 4096, 4, 5


def make_step(device, samples, width, layers):
    """Return a training step: a callable without arguments."""
    seeding.seed_everything(0)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(width, width) for _ in range(layers))
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(samples, width, device=device)
    return lambda: named_step(model, optimizer, inputs)


def predicted(samples, width, layers):
    """Return {name: (calls, FLOPs)} of one step."""
    product = 2 * samples * width**2
    return {
        "aten::addmm": (layers, layers * product),
        "aten::mm": (2 * layers - 1, (2 * layers - 1) * product),
    } | dict.fromkeys(RANGES, (1, None))


def checked(rows, expected):
    """Return the rows of operators and ranges whose calls are known."""
    by_name = {}
    for row in rows:  # the host's entry of a range, and maybe the GPU's
        kept = by_name.setdefault(row["name"], row)
        if row["work"] > kept["work"]:
            by_name[row["name"]] = row
    found = []
    for name, (calls, work) in expected.items():
        row = by_name.get(name, {"calls": 0, "work": 0, "total_s": 0.0})
        found.append(
            {
                "name": name,
                "calls": row["calls"],
                "predicted_calls": calls,
                "work": row["work"] if work else None,
                "predicted_work": work,
                "total_s": row["total_s"],
            }
        )
    return found


def figure(rows):
    """Draw the operators with most self time."""
    from common import notebook

    chosen = [row for row in rows if "self_s" in row and not row["shapes"]]
    title = "self time per step · 每步自身時間"
    return notebook.bars(chosen[:10], "self_s", title)


def main(argv=None):
    args = bench.cli(__doc__, argv)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it narrates
    samples, width, layers, steps = sizes(args)
    step = make_step(args.device, samples, width, layers)
    profile = profiled(step, WAIT, WARM_UP, steps)
    rows = operators(profile, steps)
    marks = [r for r in rows if r["name"].startswith("ProfilerStep")]
    known = {*RANGES, *(row["name"] for row in marks)}
    own = [r for r in rows if r["name"] not in known]
    span_s = sum(row["self_s"] for row in rows if not row["on_gpu"])
    expected = predicted(samples, width, layers)
    bench.report(
        args,
        [row | {"shapes": None} for row in own[:10]],
        {
            "name": "operator",
            "calls": "calls per step",
            "self_s": "self per step",
            "total_s": "with what it calls",
            "work": "FLOPs",
        },
        title="Where the time of a step goes, by operator",
        expect=(
            f"{layers} addmm and {2 * layers - 1} mm per step, "
            f"{2 * samples * width**2:,} FLOPs each; of "
            f"{WAIT + WARM_UP + steps} steps run, {steps} are in the profile"
        ),
    )
    shapes = operators(profile, steps, by_shape=True)
    products = [r for r in shapes if r["name"] in ("aten::addmm", "aten::mm")]
    bench.report(
        args,
        products[:6],
        {
            "name": "operator",
            "shapes": "shapes of its inputs",
            "calls": "calls per step",
            "self_s": "self per step",
            "work": "FLOPs",
        },
        title="The products, by shape",
    )
    counts = checked(rows, expected)
    bench.report(args, counts, title="Per step: found and predicted")
    whole = sum(row["total_s"] for row in rows if not row["on_gpu"])
    print(
        f"self times add up to {1e3 * span_s:.3g} ms per step; with what they "
        f"call, {whole / span_s:.1f} times that:\nevery level counts the "
        "levels below once more"
    )
    if args.device.type == "cpu":
        bench.left_out(
            args, "kernels and their times on a GPU: there is none here"
        )
    return own[:10] + products[:6] + counts


if __name__ == "__main__":
    bench.run(main)
