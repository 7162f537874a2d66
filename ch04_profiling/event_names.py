"""A profiler records names; what work a name stands for is decided here.

Three vocabularies meet in a trace: event categories (which changed when
Kineto renamed them), names of kernels and copies on the GPU, and names of
operators, driver calls and ranges on the host.  Each function maps one name,
so that a caller can keep its answers in a dict.
"""

import re

# kinds of events, by where they ran
GPU, RUNTIME, OPERATOR, RANGE, PYTHON = range(5)
KINDS = {
    "kernel": GPU,
    "concurrent_kernel": GPU,
    "gpu_memcpy": GPU,
    "memcpy": GPU,
    "gpu_memset": GPU,
    "memset": GPU,
    "cuda_runtime": RUNTIME,
    "runtime": RUNTIME,
    "cuda_driver": RUNTIME,
    "driver": RUNTIME,
    "hip_runtime": RUNTIME,
    "xpu_runtime": RUNTIME,
    "privateuse1_runtime": RUNTIME,
    "cpu_op": OPERATOR,
    "operator": OPERATOR,
    "user_annotation": RANGE,
    "python_function": PYTHON,
}

# what the GPU did; the order is who is named where several run at once
WORK = [
    "gemm",
    "attention",
    "optimizer",
    "elementwise",
    "other_kernel",
    "communication",
    "copy_h2d",
    "copy_d2h",
    "copy_d2d",
]
IDLE = [
    "idle_loader",
    "idle_sync",
    "idle_host",
    "idle_compilation",
    "idle_start_up",
    "idle_unknown",
]
PARTS = WORK + IDLE
COMPUTE = WORK[:5]
COPIES = WORK[6:]

COLLECTIVE = re.compile(
    r"^(void )?(nccl|rccl|msccl|nvshmem)|ncclDevKernel|ncclKernel"
    r"|cross_device_reduce|(one|two)_shot_all_?reduce|multimem_|deep_ep::"
    r"|allreduce_fusion|userbuffers_",
    re.IGNORECASE,
)
TRITON_TEMPLATE = re.compile(r"^triton_tem_")
ATTENTION = re.compile(
    r"flash|fmha|attention|sdpa|(^|[^a-z])mha_|attn|cudnn_generated_fort_n",
    re.IGNORECASE,
)
OPTIMIZER = re.compile(
    r"multi_tensor_apply|adam|adagrad|rmsprop|lamb(?!da)|lion_|muon"
    r"|(?<![a-z])sgd|fused_optim",
    re.IGNORECASE,
)
# layouts and offsets that libraries prepare around their own products
AROUND_GEMM = re.compile(
    r"nchwToNhwc|nhwcToNchw|computeOffsets|transpose_readWrite|splitKreduce"
    r"|col2im|im2col|add_tensor",
    re.IGNORECASE,
)
GEMM = re.compile(
    r"gemm|gemv|cutlass|xmma|nvjet|cublas|Cijk_|conv(?!ert)|wgrad|dgrad"
    r"|fprop|winograd|scudnn|hcudnn|implicit|matmul|(^|_)[bm]?mm_|addmm"
    r"|fft[12]d|884|1688|16816|igemm|miopen.*(sp3|asm)|grouped_conv"
    r"|ck::.*device|dot_kernel|marlin|wgmma",
    re.IGNORECASE,
)
ELEMENTWISE = re.compile(
    r"elementwise|vectorized|unrolled|softmax|norm|reduce|bn_|triton_|copy"
    r"|fill|index|gather|scatter|embedding|dropout|pool|relu|gelu|silu"
    r"|transpose|nhwc|sort|cub::|scan|arange|random|distribution|nll_loss"
    r"|cross_entropy|upsample|pad|permute|CatArray|cast|quantize|convert"
    r"|rope|rotary|where|mask|cumsum|topk|loss|compare|bounds_check",
    re.IGNORECASE,
)


def work_of_kernel(name):
    """Return which of ``WORK`` a kernel does, by its name."""
    if name.startswith("triton_") and not TRITON_TEMPLATE.match(name):
        # names of a fused kernel list operators; it is element-wise anyway
        return "optimizer" if OPTIMIZER.search(name) else "elementwise"
    if COLLECTIVE.search(name):
        return "communication"
    if ATTENTION.search(name):
        return "attention"
    if OPTIMIZER.search(name):
        return "optimizer"
    if AROUND_GEMM.search(name):
        return "elementwise"
    if GEMM.search(name):
        return "gemm"
    return "elementwise" if ELEMENTWISE.search(name) else "other_kernel"


def work_of_copy(name):
    """Return the direction of a copy; fills count as copies on the GPU."""
    short = name.replace(" ", "").lower()
    if "htod" in short or "hosttodevice" in short:
        return "copy_h2d"
    if "dtoh" in short or "devicetohost" in short:
        return "copy_d2h"
    return "copy_d2d"


def work_on_gpu(name):
    """Return which of ``WORK`` a GPU event is: copies go by their name."""
    if re.match(r"mem(cpy|set)|copy(Host|Device)", name, re.IGNORECASE):
        return work_of_copy(name)
    return work_of_kernel(name)


# ---- the host ------------------------------------------------------------

# what a host event says about the thread that is inside it
NOTHING, ACTIVE, SYNC, START_UP, COMPILATION, LOADER = range(6)
STEP = re.compile(r"^ProfilerStep\s*#?\s*(\d{1,18})")
LOADER_NAME = re.compile(
    r"^enumerate\(DataLoader\)#|DataLoaderIter\.__next__"
    r"|DataLoader.*__next__|dataloader\.py\(\d+\): __next__"
    r"|^\W*((dataloader?|data_load(er|ing)?|load_(batch|data)|next_batch"
    r"|get_batch|fetch_(batch|data))\W*$)",
    re.IGNORECASE,
)
COMPILATION_NAME = re.compile(
    r"\(dynamo_timed\)|convert_frame\.py\(\d+\)"
    r"|compile_fx(_inner)?(\.py\(\d+\))?($|:)|^inductor_compile"
    r"|^nvrtc|^cuda[A-Za-z]*JIT|^TorchScript compile",
)
SYNC_NAME = re.compile(
    r"^(cuda|hip)(Device|Stream|Event)Synchronize|^(cuda|hip)Memcpy(_v\d+)?$"
    r"|^cu(Ctx|Stream|Event)Synchronize|^hipMemcpyWithStream$"
    r"|^(cuda|hip)Memcpy(2D|ToSymbol|FromSymbol)$"
)
START_UP_NAME = re.compile(
    r"^(cuda|hip)(Free|Malloc|HostAlloc|HostRegister|HostMalloc"
    r"|StreamCreate|StreamDestroy|GetDeviceProperties|GetDeviceCount"
    r"|DeviceGetStreamPriorityRange|DeviceGetAttribute|SetDevice"
    r"|FuncGetAttributes|FuncSetAttribute|DeviceEnablePeerAccess"
    r"|DeviceGetMemPool|MemPool|ModuleLoad|DriverGetVersion"
    r"|GetDriverEntryPoint|Library|DeviceReset|DeviceSetLimit)"
    r"|^cu(Init|Module|Library|MemAlloc|MemCreate|MemMap|MemFree|Mem[A-Z]"
    r"|CtxCreate|DevicePrimaryCtx|StreamCreate|Link)"
)


def host_meaning(kind, name):
    """Return what a thread is doing while it is inside this event."""
    if STEP.match(name):
        return NOTHING  # a mark around a step says when, not what
    if kind == RUNTIME:
        if SYNC_NAME.match(name):
            return SYNC
        return START_UP if START_UP_NAME.match(name) else ACTIVE
    if LOADER_NAME.search(name):
        return LOADER
    if COMPILATION_NAME.search(name):
        return COMPILATION
    # a user's range or a Python frame may hold hours of anything
    return ACTIVE if kind == OPERATOR else NOTHING


# ---- operators of a program without a GPU --------------------------------

BOOKKEEPING = re.compile(
    r"^aten::(empty|view|t$|transpose|permute|as_strided|expand|unsqueeze"
    r"|squeeze|reshape|detach|alias|slice|select|narrow|unbind|split|chunk"
    r"|size|stride|is_|item|_local_scalar_dense|resize_|set_|result_type"
    r"|lift|_reshape_alias|unflatten|flatten|movedim|broadcast)"
    r"|^autograd::|^c10d::|Backward\d*$|^detach|^TorchDynamo|^Pregraph|^AOT"
)
CPU_COMMUNICATION = re.compile(r"^(gloo|nccl|mpi|ucc):", re.IGNORECASE)
CPU_GEMM = re.compile(
    r"mm$|mm_|matmul|conv|linear|bilinear|mkldnn|einsum|addmv|::mv|::dot|lstm"
    r"|gru",
)
CPU_ATTENTION = re.compile(r"attention|flash", re.IGNORECASE)
COMPILED = re.compile(r"Call CompiledFxGraph|cpp_fused|^graph_\d+_cpp")


def work_of_operator(name):
    """Return which of ``WORK`` an operator does on the CPU, or None."""
    if CPU_COMMUNICATION.match(name):
        return "communication"
    if COMPILED.search(name):
        return "other_kernel"
    if BOOKKEEPING.search(name) or "::" not in name:
        return None
    if CPU_ATTENTION.search(name):
        return "attention"
    if OPTIMIZER.search(name):
        return "optimizer"
    return "gemm" if CPU_GEMM.search(name) else "elementwise"
