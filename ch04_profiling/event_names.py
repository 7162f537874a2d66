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
    "runtime": RUNTIME,
    "driver": RUNTIME,
    "cpu_op": OPERATOR,
    "operator": OPERATOR,
    "user_annotation": RANGE,
    "python_function": PYTHON,
}


def kind_of(category):
    """Return the kind of a category, -1 of one that is not kept."""
    if category.endswith(("_runtime", "_driver")):  # of any device
        return RUNTIME
    return KINDS.get(category, -1)


# notes of the recorder, and what other events say better
PASSED_OVER = {
    "",
    "trace",
    "overhead",
    "gpu_user_annotation",
    "cuda_sync",
    "cuda_event",
    "cpu_instant_event",
    "external_correlation",
    "collective_comm",
    "gpu_pm_counter",
    "ac2g",
    "async_cpu_to_gpu",
    "async_gpu",
    "fwdbwd",
    "fwd_bwd",
}
# what runs on devices whose names of work are not known here
FOREIGN = re.compile(r"^(mtia|hpu|xpu|npu|glow|tpu|mps|privateuse1)", re.I)

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

# A kernel's template arguments and parameters name types, not its work:
# these wrappers are the exception, they say what they do only there.
WRAPPER = re.compile(
    r"cutlass|^kernel\d*$|device_kernel|kentry|globalKernel|xmma|^kernel_?impl"
    r"|cudnn_generated|AttentionKernel|^type$",
    re.IGNORECASE,
)
PLAIN = re.compile(
    r"elementwise_kernel|reduce_kernel|softmax|_norm_|normkernel|CatArray"
    r"|cub::|rocprim|thrust::",
    re.IGNORECASE,
)
TRITON_FUSED = re.compile(r"^triton_(?!tem_|b?mm|addmm|scaled_mm|conv|flex)")
COLLECTIVE = re.compile(
    r"(?<![a-z])(nccl|rccl|msccl|oneccl|nvshmem|deep_?ep)"
    r"|(?<!block)(?<!warp)(?<!block_)(?<!warp_)all_?(reduce|gather|to_?all)"
    r"|all2all|reduce_?scatter|cross_device_reduce|multimem_|userbuffers_"
    r"|quick_?reduce|lamport|symmetric_memory|(put|wait)_signal|sendrecv"
    r"|(internode|intranode|(?<![a-z])ep)(_ll)?(::|_)(dispatch|combine)",
    re.IGNORECASE,
)
AROUND_ATTENTION = re.compile(
    r"and_cache|append_?paged|rotary|rope(?![a-z])|layer_?norm|rms_?norm"
    r"|flashinfer::(norm|activation|sampling|quantization)",
    re.IGNORECASE,
)
ATTENTION = re.compile(
    r"flash(?!infer)|fmha|attention|sdpa|(?<![a-z])m?mha_|attn|mem_eff"
    r"|(prefill|decode)With|(?<![a-z])(bwd|fwd)_kernel_(dk|dq|fuse|one_col)"
    r"|(?<![a-z])mla_|cudnn_generated_fort_n",
    re.IGNORECASE,
)
OPTIMIZER = re.compile(
    r"multi_tensor_apply|adam|adagrad|rmsprop|lamb(?!da)|(?<![a-z])lion_"
    r"|(?<![a-z])muon|(?<![a-z])sgd|fused_?optim|kOptimizer"
    r"|PreconditionOptim",
    re.IGNORECASE,
)
# layouts, offsets and sums that libraries prepare around their own products
AROUND_GEMM = re.compile(
    r"nchwToNhwc|nhwcToNchw|compute\w*Offsets|transpose_readWrite|splitK_?red"
    r"|ReduceSplitK|col2im|im2col|im2d2col|add_tensor|cublasLtEpilogue"
    r"|reduce_wgrad|quantize|scal_kernel|moe_align|moe_sum",
    re.IGNORECASE,
)
GEMM = re.compile(
    r"(?<!fb)gemm|gemv|cutlass|xmma|nvjet|(?<![a-z])cublas|Cijk_"
    r"|conv(?!er[ts])|wgrad|dgrad|fprop|winograd|[sh]cudnn|\d+cudnn_"
    r"|implicit|matmul|(?<![a-z])(ba?d?|ad+)?mm(_|$|kernel)|csrm[mv]|spm[mv]|sddmm"
    r"|fft[12]d|(?<![a-z])dot_kernel|marlin|machete|wgmma"
    r"|fused_moe|grouped_mm|RNN_block|persistRNN|XXT_kernel|ba_plus_cAA"
    r"|MIOpenCv",
    re.IGNORECASE,
)
ELEMENTWISE = re.compile(
    r"elementwise|vectorized|unrolled|softmax|norm|moments|GammaBeta|reduce"
    r"|bn_|triton_|copy|fill|index|indice|gather|scatter|embedding|embs"
    r"|dropout|pool|relu|gelu|silu|sigmoid|tanh|swish|glu(?![a-z])|act_and"
    r"|transpose|nhwc|sort|cub::|rocprim|hipcub|thrust::|scan|arange|random"
    r"|distribution|sampl|multinomial|nll|cross_entropy|criterion|upsample"
    r"|interp|pad|permut|CatArray|cast|quantize|conver[ts]|rope|rotary|where"
    r"|mask|cumsum|topk|top_k|loss|compare|bounds_check|(?<![a-z])ln_(fwd|bwd)"
    r"|batchnorm|OpTensor|SubTensor|Op\dd|scalePacked|globalKernel|fft"
    r"|tri[ul](?![a-z])|flip|roll_|repeat|unique|histogram|bincount|nonzero"
    r"|segment|bucketize|lengths|offsets|to_dense|linearize|foreach|lerp"
    r"|kv_?cache|reshape_and|recat|compute_cuda_kernel|elemWise|scal_kernel"
    r"|moe_(align|sum)|fbgemm_gpu::|(?<![a-z])(add|mul|sub|div|bias|exp|log"
    r"|sqrt|sum|mean)(?![a-z])",
    re.IGNORECASE,
)


def _head(name):
    """Return a kernel's own name: no template arguments, no parameters."""
    plain = name.replace("(anonymous namespace)::", "")
    plain = re.sub(r"^(void|std::enable_if<.*?>::type) +", "", plain)
    return re.split(r"[<(]", plain, maxsplit=1)[0]


def work_of_kernel(name):
    """Return which of ``WORK`` a kernel does, by its name."""
    if TRITON_FUSED.match(name):
        # names of a fused kernel list operators; it is element-wise anyway
        return "optimizer" if OPTIMIZER.search(name) else "elementwise"
    head = _head(name)
    whole = name if WRAPPER.search(head) else head
    if COLLECTIVE.search(head):
        return "communication"
    if AROUND_ATTENTION.search(whole):
        return "elementwise"
    if OPTIMIZER.search(head):
        return "optimizer"
    if PLAIN.search(head) and "splitK" not in head:
        return "elementwise"
    if ATTENTION.search(whole):
        return "attention"
    if AROUND_GEMM.search(whole):
        return "elementwise"
    if GEMM.search(whole):
        return "gemm"
    return "elementwise" if ELEMENTWISE.search(whole) else "other_kernel"


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
# how ranges and functions spell that a batch is waited for
BATCH = (
    r"(?:data[ _-]*(?:loader|loading|load)"
    r"|(?<![a-z])(?:(?:load|get|fetch|read)(?:ing)?"
    r"|next|wait(?:ing)?[ _-](?:for|on))"
    r"(?:[ _-]*(?:the|next|train|training|sanity_check|mini))*"
    r"[ _-]*(?:data|batch(?:es)?|samples?|inputs?|loader)"
    r"|(?<![a-z_])data[ _-]*(?:time|wait|fetch|fetching|iter|iterator|next)"
    r"|(?<![a-z_])batch[ _-]*(?:load|fetch)(?:ing)?)"
    r"(?![a-z]|[ _-]*(?:size|norm|stat|ptr|type|shape|count|id|dim|len|num"
    r"|loss|metric|parallel))"
)
LOADER_FILE = (
    r"(?:data_?load|(?:^|[/\\_])loaders?\.py|torchdata|webdataset|wids|ffcv"
    r"|(?:^|[/\\])dali[/\\]|litdata|petastorm|fetchers?\.py|combined_loader"
    r"|iterator_ops|iterable_dataset|utils[/\\]data[/\\])"
)
LOADER_NAME = re.compile(
    r"^enumerate\(Data(?:Loader|Pipe)\)#|DataLoader\w*\.__next__"
    # a Python frame, "file.py(line): function": where the file lies says
    # nothing, but a loader's own file names what its __next__ is
    rf"|\(\d+\): _*{BATCH}"
    rf"|{LOADER_FILE}[^:]*\(\d+\): (?:__next__|__iter__|next|iterator"
    r"|_next_data|_try_get_data|_get_data|_fetch\w*)$"
    # a range, in any words; an operator, a module and a hook are none
    r"|^(?!\w+::|nn\.Module:|.*\(\d+\): |.*(?:state|checkpoint|init|setup"
    r"|creat|build|Module\]|[^a-z]to[^a-z]*(?:gpu|cuda|device)"
    r"|\#\# wait_for_batch))"  # in TorchRec, for a copy to the GPU
    rf"(?:\W*data\W*$|.*loop\W+\w+_next$|.*?{BATCH})",
    re.IGNORECASE,
)
# What makes code counts as compilation, what loads it as start-up.  Frames
# of torch._inductor and triton also run what is long since compiled.
COMPILATION_NAME = re.compile(
    r"\(dynamo_timed\)|convert_frame\.py\(\d+\)"
    r"|compile_fx(_inner)?(\.py\(\d+\))?($|:)|^inductor_compile"
    r"|(^|[/\\])(torch[/\\]_(inductor|dynamo|functorch)|triton|numba|cupy)"
    r"[/\\].*\(\d+\): "
    r"(\w*_)?((pre|re)?compile|codegen|autotune|make_(ttir|llir|ptx|cubin)"
    r"|bench|benchmark)(_(?!wrapper)\w+)?$"
    r"|cpp_extension\.py\(\d+\): _*(load|load_inline|jit_compile)$"
    r"|^(nvrtc|hiprtc)(?!GetErrorString)|^cuda[A-Za-z]*JIT|^cuLink"
    r"|^(cuda|cu|hip)GraphInstantiate|^TorchScript compile",
)
SYNC_NAME = re.compile(
    r"^(cuda|hip)(Device|Stream|Event)Synchronize|^(cuda|hip)Memcpy(_v\d+)?$"
    r"|^cu(Ctx|Stream|Event)Synchronize|^hipMemcpyWithStream$"
    r"|^(cuda|hip)Memcpy(2D|ToSymbol|FromSymbol)$"
)
START_UP_NAME = re.compile(
    r"^(cuda|hip)(Free|Malloc|HostAlloc|HostRegister|HostMalloc"
    r"|StreamCreate|StreamDestroy|DeviceEnablePeerAccess"
    r"|DeviceGetMemPool|MemPool|ModuleLoad|Library|DeviceReset"
    r"|DeviceSetLimit)"
    r"|^cu(Init|Module|Library|MemAlloc|MemCreate|MemMap|MemFree|Mem[A-Z]"
    r"|CtxCreate|DevicePrimaryCtx|StreamCreate)|^hipInit"
)
# questions to the driver: microseconds each, unless the first starts it
QUERY_NAME = re.compile(
    r"^(cuda|hip)(GetDevice|DeviceGet|SetDevice|DriverGet|RuntimeGet|Func"
    r"|GetDriverEntryPoint|GetSymbol|GetFuncBySymbol|PointerGet|Occupancy)"
)


def host_meaning(kind, name):
    """Return what a thread is doing while it is inside this event."""
    if STEP.match(name):
        return NOTHING  # a mark around a step says when, not what
    if kind == RUNTIME:
        if SYNC_NAME.match(name):
            return SYNC
        if COMPILATION_NAME.search(name):
            return COMPILATION
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
    r"|lift|_reshape_alias|unflatten|flatten|movedim|broadcast|resolve_)"
    r"|^autograd::|^_?c10d\w*::|Backward\d*$|^detach|^TorchDynamo|^Pregraph|^AOT"
)
CPU_COMMUNICATION = re.compile(r"^(gloo|nccl|mpi|ucc):", re.IGNORECASE)
CPU_GEMM = re.compile(
    r"(?<!co)(?<!sy)mm(_|$)|matmul|(?<!fb)gemm|conv(?!er[ts])"
    r"|(?<!upsample_)(?<!bi)(?<!tri)linear|(?<![a-z_])bilinear$|trilinear$"
    r"|einsum|addmv|(?<![a-z])(mv|v?dot|multi_dot)$|(?<![a-z])(rnn|lstm|gru)",
)
# they compute more than they move, or look their way through memory
CPU_OTHER = re.compile(
    r"linalg_(?!vector_norm|norm|_powsum|cross|diagonal|vecdot)"
    r"|(?<!re)solve|cholesky"
    r"|(?<![a-z])(lu|svd|eig|qr|geqrf|or[gm]qr|inverse|pinverse)(_|$)|fft"
    r"|[cp]dist|sort|top_?k|kthvalue|median|quantile|unique|searchsorted"
    r"|bucketize|hist|bincount|nms|ctc_loss|matrix_exp",
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
    family, _, own = name.rpartition("::")
    if CPU_GEMM.search(own):
        return "gemm"
    if CPU_OTHER.search(own):
        return "other_kernel"
    known = family in ("aten", "prims", "quantized") or ELEMENTWISE.search(own)
    return "elementwise" if known else "other_kernel"
