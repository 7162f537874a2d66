"""What names stand for, and which recordings belong to one process."""

import pytest
import synthetic

from ch04_profiling import (
    accounting,
    find_bottleneck,
    timeline,
    traces,
    verdicts,
)
from ch04_profiling import event_names as names
from common import bench

# ---- kernels -------------------------------------------------------------

AT = "void at::native::"
KERNELS = {
    "gemm": """\
ampere_sgemm_128x64_tn
ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn
ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_64x3_nn
ampere_gcgemm_64x64_nt
volta_sgemm_32x128_tt
volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn
volta_h884cudnn_256x64_ldg8_relu_exp_small_nhwc_tn_v1
turing_fp16_s1688cudnn_fp16_128x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1
maxwell_sgemm_128x64_nn
maxwell_scudnn_128x128_stridedB_splitK_small_nn
volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1
cudnn_infer_volta_scudnn_128x64_3dconv_fprop_medium_nn_v1
sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize32x32x64_stage6_warpsize2x2x1
sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_cublas
sm80_xmma_dgrad_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128
sm86_xmma_fprop_implicit_gemm_indexed_f16f16_f16f32_f32_nhwckrsc_nhwc
nvjet_tst_192x192_64x3_2x1_v_bz_coopB_NNN
nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT
void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x4_nn>(P)
void cutlass::Kernel<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(P)
void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<G>>(P)
void cutlass_cudnn_train::Kernel<cutlass_tensorop_s1688wgrad_optimized_tf32>()
_ZN19cutlass_cudnn_train6KernelINS_4conv6kernel23ImplicitGemmConvolutionIN
void gemmSN_TN_kernel<float, 128, 16, 2, 4, 8, 9, false>(cublasGemvTensor)
void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 2>(P)
void gemvNSP_kernel<float, float, float, float, 1, 16, 4, 1024>(cublasParams)
std::enable_if<true, void>::type internal::gemvx::kernel<int, float, true>(P)
void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensor<float>>>(P)
void magma_sgemmEx_kernel<float, float, float, false, false, 6, 3, 5>(int)
void implicit_convolve_sgemm<float, float, 1024, 6, 7, 3, 3, 5, 1>(int)
void explicit_convolve_sgemm<float, int, 1024, 5, 5, 3, 3, 3, 0, false>(int)
void cudnn::cnn::wgrad_alg0_engine<float, 128, 5, 5, 3, 3, 3, false>(int)
void cudnn::detail::dgrad_engine<float, 128, 6, 7, 3, 3, 5, false>(int)
void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(P)
void fft2d_r2c_32x32<float, false, 0u, false>(float2*, float const*, int)
void conv2d_grouped_direct_kernel<float, float, int, 3, 3>(P)
void at::native::conv_depthwise2d_forward_kernel<3, c10::Half, int>(P)
void cusparse::csrmm_v2_kernel<float, float>(P)
void cusparse::csrmv_v3_kernel<int, int, float, float, float>(P)
void spmm_kernel<float, 4>(int*, float*)
void cusparse::sddmm_kernel<int, float>(P)
fused_moe_kernel
void RNN_blockPersist_fp_LSTM<__half, __half, float, 512, 4, 2>(P)
Cijk_Alik_Bljk_SB_MT64x16x32_MI16x16x1_SN_LDSB0_AFC1_AFEM1
Custom_Cijk_Alik_Bljk_HHS_BH_Bias_HA_S_SAV_NTD_SK3_UserArgs_MT128x128
miopenSp3AsmConv_v30_3_1_gfx9_fp32_f2x3_stride1
gridwise_convolution_implicit_gemm_v4r1_nchw_kcyx_nkhw_lds_double_buffer
igemm_fwd_gtcx_nhwc_fp16_bx0_ex1_bt128x128x32_wt32x32x8
MIOpenConvUni
MIOpenCvBwdWrW
void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm_xdl<8>>(Argument)
void ck::kernel_grouped_conv_fwd_multiple_abd_xdl_cshuffle<C>(Argument)
_ZN7ck_tile6kentryILi1ENS_10GemmKernelINS_12GemmPipelineEEEEvT0_
rocblas_gemvt_kernel
void Marlin<256, 1, 8, 8, 4, -1>(int4 const*, int4 const*, int4*, int)
deep_gemm::fp8_gemm_kernel
_w8a8_block_fp8_matmul
matmul_kernel_persistent
triton_mm_12
triton_tem_fused_mm_3
triton_tem_fused_addmm_relu_7
kgemm_4bit_inference_naive
XXT_kernel
ba_plus_cAA_kernel""",
    "attention": """\
void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128>>(P)
void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_traits>(P)
void pytorch_flash::flash_fwd_splitkv_combine_kernel<T, 8, 1, true>(P)
void pytorch_flash::fwd<128>(P)
void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::Collective>>(P)
void cutlass::device_kernel<flash::FlashAttnBwdPreprocess<cute::tuple>>(P)
fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::P)
fmha_cutlassB_bf16_aligned_128x64_k64_sm80(PyTorchMemEffAttention::P)
void fmha_v2_flash_attention_fp16_64_64_S_qkv_128_sm80_kernel_nl(P)
cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128
void attention_kernel_batched_impl<AttentionKernel<float, Sm80, true>>(P)
void vllm::paged_attention_v2_kernel<__half, 128, 16, 128, 512>(P)
void flashinfer::BatchPrefillWithPagedKVCacheKernel<KTraits>(P)
void flashinfer::BatchDecodeWithPagedKVCacheKernel<8, 2>(P)
void flashinfer::mla::kernel_mla_decode<T>(P)
void mmha::masked_multihead_attention_kernel<__half, 128>(P)
_ZN7ck_tile6kentryILi2ENS_13FmhaFwdKernelINS_28BlockFmhaPipelineQRKSVS
_attn_fwd
attn_fwd
_attn_bwd_preprocess
bwd_kernel_dk_dv
bwd_kernel_dq
_bwd_kernel_one_col_block
triton_tem_fused_flex_attention_0
triton_flex_attention_backward_7""",
    "optimizer": """\
void at::native::multi_tensor_apply_kernel<M<4>, FusedAdamMathFunctor<f>>(T)
void at::native::(anonymous namespace)::multi_tensor_apply_kernel<M, Add>(T)
void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>(int)
void multi_tensor_apply_kernel<M<3>, FusedSgdMathFunctor<float, 3>>(T)
void multi_tensor_apply_kernel<TensorListMetadata<4>, LAMBStage1Functor>(int)
void kOptimizerStatic8bit2StateBlockwise<float, 0, 2048, 8>(float*)
void kPreconditionOptimizer32bit1State<float, 4, 4096, 8>(float*)
void adam_cuda_kernel<float, float>(float*, float*)
split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_cta(P)
triton_poi_fused_adamw_add_mul_3""",
    "communication": """\
ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)
ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096>)
ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)
ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)
ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)
ncclSymkDevKernel_AllGather_LL(ncclSymkDevArgs)
void mscclKernel_Sum_float_Simple_false(ncclDevComm*, mscclAlgo*)
void mscclpp::allreduce7<float>(float*)
void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(P)
void vllm::cross_device_reduce_2stage<__half, 4>(P)
void oneShotAllReduceKernel<__half, 8, true>(AllReduceParams)
void tensorrt_llm::kernels::twoShotAllReduceKernel<__half, 4>(P)
void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamp
void quickreduce::allreduce_prototype_twoshot<Q>(half const*)
one_shot_all_reduce_kernel
multimem_all_reduce_kernel
void c10d::symmetric_memory::barrier_kernel(unsigned int**)
all_gather_kernel
reduce_scatter_kernel
all_to_all_kernel
void deep_ep::intranode::dispatch<8, 768>(int4*)
void deep_ep::internode_ll::combine<true, 7168, 11>(void*)
void nvshmemi_transfer_rma_p2p<1>(void*)
nvshmem_alltoall_kernel
userbuffers_fp16_sum_inplace_gpu_rr_rs_oop_fp8""",
    "elementwise": """\
void at::native::vectorized_elementwise_kernel<4, AddFunctor<float>>(int)
void at::native::vectorized_elementwise_kernel<4, launch_clamp_scalar()>(int)
void at::native::vectorized_elementwise_kernel<4, fbgemm_gpu::to_hfp8>(int)
void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda()>(int)
void at::native::elementwise_kernel<128, 2, gpu_kernel_impl<conv_out>>(int)
void at::native::reduce_kernel<512, 1, ReduceOp<float, MeanOps<float>>>(R)
void at::native::(anonymous namespace)::softmax_warp_forward<float>(float*)
void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>(f)
void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel<float>()
void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>(l)
void at::native::(anonymous namespace)::LayerNormForwardCUDAKernel<float>()
void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>()
void at::native::batch_norm_transform_input_kernel<float, float, true>(T)
void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, 2>(float*)
void at::native::(anonymous namespace)::indexSelectLargeIndex<float>(T)
void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float>(T)
void at::native::(anonymous namespace)::distribution_elementwise_grid_stride()
void at::native::(anonymous namespace)::max_pool_backward_nchw<float>(float*)
void at::native::(anonymous namespace)::embedding_backward_feature_kernel(T)
void at::native::_scatter_gather_elementwise_kernel<128, 4, F>(int)
_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_13AUnaryFunctorIfff
void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_2d()
void cunn_ClassNLLCriterion_updateOutput_kernel<float, float>(float*)
void cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>(P)
void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(P)
void cudnn::ops::scalePackedTensor_kernel<float, float>(long, float*, float)
void cudnn::ops::convertTensor_kernel<float, __half>(P)
cask_cudnn::computeBOffsetsKernel(cask_cudnn::ComputeBOffsetsParams)
cask_cudnn::computeWgradBOffsetsKernel(cask_cudnn::ComputeWgradBOffsets)
void cudnn::cnn::im2col4d_kernel<float, long>(cudnn::cnn::im2col4d_params)
void cublasLt::splitKreduce_kernel<32, 16, int, float, float>(P)
void epilogue::impl::globalKernel<float, float>(cublasLtEpilogue_t)
void conversion_kernel<float, __half>(float const*, __half*)
void convert_fp8_kernel(half*)
void LSTM_elementWise_fp<__half, __half, float>(P)
void cub::DeviceRadixSortOnesweepKernel<cub::Policy800, false, long>(int*)
void cub::DeviceScanKernel<cub::AgentScanPolicy<128, 15, int>>(int*)
void fbgemm_gpu::permute_2D_data_kernel<true, int, int, float>(int)
void bounds_check_indices_kernel<long>(fbgemm_gpu::Accessor<long>)
void split_embedding_codegen_forward_unweighted_kernel<float>(fbgemm_gpu::A)
void vllm::rms_norm_kernel<c10::BFloat16>(P)
void vllm::act_and_mul_kernel<c10::Half, silu_kernel>(P)
void vllm::rotary_embedding_kernel<c10::Half, true>(long const*)
void vllm::reshape_and_cache_flash_kernel<__half, __half>(P)
void vllm::moe::moe_align_block_size_kernel<int>(P)
void flashinfer::norm::RMSNormKernel<8, __half>(__half*)
void dropout_layer_norm::ln_fwd_kernel<Kernel_traits>(FwdParams)
_layer_norm_fwd_1pass_kernel
_swiglu_fwd_kernel
liger_cross_entropy_kernel
kDequantizeBlockwise
void regular_fft<256u, 4u, 64u, (padding_t)0>(kernel_arguments_t<u>)
MIOpenBatchNormFwdTrainSpatial
SubTensorOpWithScalar1d
Op2dTensorLite
triton_poi_fused_add_mm_gelu_3
triton_red_fused_native_layer_norm_2
triton_per_fused__softmax_sum_mul_12
triton_poi_fused_convolution_relu_4
triton__0d1d2de""",
    "other_kernel": """\
at::cuda::(anonymous namespace)::spin_kernel(long)
my_kernel(float*)
void simulate<1688>(float*, int)
update_particles(fbgemm::Table)""",
}
TABLE = [
    (name, work)
    for work, lines in KERNELS.items()
    for name in lines.splitlines()
]


def test_there_are_many_kernels_and_none_twice():
    assert len(TABLE) == len(set(TABLE)) >= 120
    assert set(KERNELS) == {*names.COMPUTE, "communication"}


@pytest.mark.parametrize(("name", "work"), TABLE)
def test_a_kernels_name_says_its_work(name, work):
    assert names.work_on_gpu(name) == work


# ---- the host ------------------------------------------------------------

WAITS_FOR_A_BATCH = """\
Data loading
load data
data_time
data
## data ##
## next_batch ##
## load_batch ##
data-loading
dataloader
fetch batch
load next batch
fetchData
wait for data
Waiting for batch
get_batch
get_train_batch
[pl][profile][_TrainingEpochLoop].train_dataloader_next
[pl][profile][_EvaluationLoop].val_next
enumerate(DataPipe)#Mapper
enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__
train.py(116): get_batch
<ipython-input-3-a1b2>(5): get_batch
train.py(3): load_data
torch/utils/data/dataloader.py(701): __next__
C:\\torch\\utils\\data\\dataloader.py(701): __next__
nvidia/dali/plugin/pytorch.py(210): __next__
webdataset/pipeline.py(64): iterator
tensorflow/python/data/ops/iterator_ops.py(766): __next__
torchdata/nodes/base_node.py(122): __next__
accelerate/data_loader.py(454): __iter__"""
WAITS_FOR_NONE = """\
load_state_dict
model.py(3): load_state_dict
save dataloader state
upload
upload batch
payload data
workload data
aten::load_data
aten::_softmax_backward_data
fbgemm::permute_2D_sparse_data
## wait_for_batch ##
## all2all_tw_data:wait ##
## all2all_data:lengths_wait ##
triton_red_fused__log_softmax_backward_data_div_mm
/home/me/dataloading/train.py(5): main
dataloader.py(10): __init__
get_batch_size
train.py(8): get_batch_size
get_data_ptr
copy data to GPU
load batch to gpu
nn.Module: DataLoaderNet_0
[pl][profile][LightningDataModule]Digits.train_dataloader
[pl][profile][Strategy]SingleDeviceStrategy.batch_to_device
DistributedDataParallel.forward
data_parallel
torch/nn/modules/batchnorm.py(3): forward
reload batch norm
update time
threading.py(9): next
queue.py(154): get
train.py(9): train_one_epoch"""


@pytest.mark.parametrize("name", WAITS_FOR_A_BATCH.splitlines())
def test_a_wait_for_a_batch_is_known_by_its_words(name):
    for kind in (names.RANGE, names.PYTHON, names.OPERATOR):
        assert names.host_meaning(kind, name) == names.LOADER


@pytest.mark.parametrize("name", WAITS_FOR_NONE.splitlines())
def test_like_words_are_no_wait_for_a_batch(name):
    for kind in (names.RANGE, names.PYTHON, names.OPERATOR):
        assert names.host_meaning(kind, name) != names.LOADER


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("get_batch", "user_annotation"),
        ("train.py(116): get_batch", "python_function"),
        ("Data loading", "user_annotation"),
        ("[pl][profile][_FitLoop].train_dataloader_next", "cpu_op"),
    ],
)
def test_a_loader_under_any_name_is_found(name, call, tmp_path):
    made = synthetic.data_bound()
    for event in made.events:
        if event["name"].startswith("enumerate"):
            event |= {"name": name, "cat": call}
    (finding,) = read(made, tmp_path)["findings"]
    assert finding["kind"] == "data-bound"
    assert finding["gain_bound"] == pytest.approx(0.6, abs=0.01)
    assert name in finding["evidence"]


COMPILES = """\
_compile.compile_inner (dynamo_timed)
triton/compiler/compiler.py(230): compile
/usr/lib/python3/triton/backends/nvidia/compiler.py(300): make_cubin
triton/runtime/jit.py(700): _do_compile
torch/_inductor/compile_fx.py(500): compile_fx
torch\\_inductor\\compile_fx.py(500): compile_fx_inner
torch/_inductor/graph.py(1900): compile_to_module
torch/_inductor/runtime/triton_heuristics.py(200): _precompile_config
torch/_inductor/runtime/triton_heuristics.py(900): autotune_to_one_config
torch/_dynamo/convert_frame.py(700): _compile
torch/_dynamo/output_graph.py(3): compile_and_call_fx_graph
torch/_functorch/aot_autograd.py(3): aot_module_compile
torch/utils/cpp_extension.py(1200): load_inline
cupy/cuda/compiler.py(9): _compile_using_nvrtc"""
COMPILES_NOTHING = """\
torch/_inductor/output_code.py(465): __call__
torch/_inductor/runtime/triton_heuristics.py(1100): run
torch/_inductor/cudagraph_trees.py(3): run
torch/_dynamo/eval_frame.py(600): compile_wrapper
torch/_functorch/aot_autograd.py(9): compiled_fn
triton/runtime/jit.py(300): run
re.py(250): compile
re/__init__.py(226): compile
<built-in function compile>
Torch-Compiled Region: 0/0
TorchDynamo Cache Lookup
nn.Module: OptimizedModule_0"""
CALLS = {
    names.COMPILATION: "nvrtcCompileProgram hiprtcCompileProgram "
    "cuLinkComplete cudaGraphInstantiate cudaGraphInstantiateWithFlags "
    "hipGraphInstantiate",
    names.START_UP: "cuModuleLoadData cuModuleLoadDataEx hipModuleLoadData "
    "cuLibraryLoadData cudaMalloc cudaFree cudaStreamCreateWithPriority",
    names.SYNC: "cudaStreamSynchronize hipDeviceSynchronize cudaMemcpy",
    names.ACTIVE: "cudaLaunchKernel cudaGraphLaunch cudaFuncGetAttributes "
    "cudaDeviceGetAttribute cuLaunchKernelEx",
}


def test_compilation_is_what_makes_code():
    for name in COMPILES.splitlines():
        for kind in (names.RANGE, names.PYTHON):
            assert names.host_meaning(kind, name) == names.COMPILATION, name
    for name in COMPILES_NOTHING.splitlines():
        for kind in (names.RANGE, names.PYTHON):
            assert names.host_meaning(kind, name) == names.NOTHING, name


@pytest.mark.parametrize("meaning", CALLS)
def test_calls_of_the_driver_load_code_or_make_it(meaning):
    for name in CALLS[meaning].split():
        assert names.host_meaning(names.RUNTIME, name) == meaning, name


def test_a_kernel_language_that_compiles_in_each_step_is_found(tmp_path):
    made = synthetic.compilation()
    for event in made.events:
        if "dynamo_timed" in event["name"]:
            event["name"] = "triton/compiler/compiler.py(230): compile"
            event["cat"] = "python_function"
    (finding,) = read(made, tmp_path)["findings"]
    assert finding["kind"] == "compilation"
    assert finding["gain_bound"] == pytest.approx(0.5, abs=0.01)


# ---- kinds of events that are not known ----------------------------------


def read(recording, folder, name="trace.json"):
    path = folder / name
    path.write_text(recording.text(), encoding="utf-8")
    return find_bottleneck.read(path)


def warning(report, kind):
    (found,) = (w for w in report["warnings"] if w["kind"] == kind)
    return found["text"]


def test_categories_that_are_not_known_are_named_and_counted(tmp_path):
    made = synthetic.data_bound()
    before = read(made, tmp_path)
    assert "unknown" not in str([w["kind"] for w in before["warnings"]])
    for k in range(1200):
        made.add("cosmic_rays", f"ray {k % 7}", 10 * k, 5)
    made.add("\x1b[31m", "red", 0, 1)
    made.add("ac2g", "arrow", 0, 1)
    made.add("overhead", "Buffer Flush", 0, 1)
    report = read(made, tmp_path)
    assert "1,200 × cosmic_rays" in warning(report, "unknown-categories")
    assert "\x1b" not in warning(report, "unknown-categories")
    assert "ac2g" not in warning(report, "unknown-categories")
    assert report["ranks"][0]["parts"] == before["ranks"][0]["parts"]


def test_of_a_name_without_end_the_beginning_is_read(tmp_path):
    made = synthetic.compute_bound("ampere_sgemm" + "<x" * 100_000)
    path = tmp_path / "trace.json"
    path.write_text(made.text())
    (trace,) = traces.read([path])
    assert max(map(len, trace.names)) == traces.LONGEST_NAME
    assert find_bottleneck.read(path)["ranks"][0]["parts"]["gemm"] == 11_760


@pytest.mark.parametrize("device", ["mtia_ccp_events", "hpu_op"])
def test_a_device_that_is_not_known_is_no_cpu_program(device, tmp_path):
    made = synthetic.Recording(gpu=False)
    for k in range(30):
        made.add("cpu_op", "aten::mm", 300 * k, 250)
        made.add(device.split("_")[0] + "_runtime", "launch", 300 * k, 5)
        made.add(device, "fc-dtype_Float", 300 * k + 20, 200, lane=900)
    report = read(made, tmp_path)
    said = warning(report, "unknown-device")
    assert f"30 × {device}" in said and "not understood" in said
    (finding,) = report["findings"]
    assert finding["kind"] == "no-gpu-events"
    assert finding["evidence"] == said  # not "add ProfilerActivity.CUDA"


# ---- cycles of one profiler ----------------------------------------------


def write_cycles(folder, cycles):
    """Write {file: (recording, seconds after the first)}."""
    folder.mkdir(exist_ok=True)
    for name, (made, later_s) in cycles.items():
        for event in made.events:
            event["ts"] += later_s * 1e6
        (folder / name).write_text(made.text(), encoding="utf-8")
    return find_bottleneck.read(folder)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (
            "host_41.1694128201.pt.trace.json",
            "host_41.169412829.pt.trace.json",
        ),
        ("host_41.1694121.pt.trace.json", "host_57.1694122.pt.trace.json"),
        ("first.json", "second.json"),
        ("rank0_step5.json", "rank0_step9.json"),
    ],
)
def test_cycles_of_a_process_are_no_ranks(one, two, tmp_path):
    report = write_cycles(
        tmp_path,
        {
            one: (synthetic.data_bound(), 0),
            two: (synthetic.compute_bound(), 5),
        },
    )
    (rank,) = report["ranks"]
    assert rank["file"] == two
    assert [f["kind"] for f in report["findings"]] == ["compute-bound"]
    said = warning(report, "several-cycles")
    assert f"{two} is read, left out: {one}" in said


def test_cycles_of_ranks_are_not_matched_with_each_other(tmp_path):
    """Balanced ranks; the network is slower in the second cycle."""
    cycles = {}
    for rank in range(2):
        for cycle, wait in enumerate((100, 900)):
            made = synthetic.communication_bound(rank, 2, wait)
            name = f"host_{7 + rank}.{100_000_000 + cycle}.pt.trace.json"
            cycles[name] = made, 3 * cycle
    report = write_cycles(tmp_path, cycles)
    assert [r["rank"] for r in report["ranks"]] == [0, 1]
    assert [r["file"][-15] for r in report["ranks"]] == ["1", "1"]
    assert "straggler" not in {f["kind"] for f in report["findings"]}
    assert warning(report, "several-cycles").startswith("all ranks: 2 record")


def test_the_cycle_that_all_ranks_have_is_read(tmp_path):
    """Rank 1 ended after the first one."""
    made = {
        "rank0_a.json": (synthetic.straggler(0), 0),
        "rank0_b.json": (synthetic.straggler(0), 3),
        "rank1_a.json": (synthetic.straggler(1), 0.001),
        "rank2_a.json": (synthetic.straggler(2), 0),
        "rank2_b.json": (synthetic.straggler(2), 3),
    }
    report = write_cycles(tmp_path, made)
    assert [r["file"] for r in report["ranks"]] == [
        "rank0_a.json",
        "rank1_a.json",
        "rank2_a.json",
    ]
    (late,) = (f for f in report["findings"] if f["kind"] == "straggler")
    assert late["rank"] == 1


def test_recordings_of_the_same_time_are_ranks(tmp_path):
    """Processes of containers may have the same number."""
    report = write_cycles(
        tmp_path,
        {
            "a.json": (synthetic.data_bound(), 0),
            "b.json": (synthetic.data_bound(), 0.002),
        },
    )
    assert [r["rank"] for r in report["ranks"]] == [0, 1]
    assert "several-cycles" not in {w["kind"] for w in report["warnings"]}


# ---- pictures ------------------------------------------------------------


def ranks_of(folder, shifts_us):
    for rank, shift in enumerate(shifts_us):
        made = synthetic.straggler(rank)
        for event in made.events:
            event["ts"] += shift
        (folder / f"rank{rank}.json").write_text(made.text())
    return verdicts.number(traces.read([folder]))


def test_ranks_are_drawn_on_one_axis(tmp_path, monkeypatch):
    ranks = ranks_of(tmp_path, [0, 4000, 1000])
    begins, aligned = find_bottleneck.starts_ms(ranks)
    assert aligned and begins.tolist() == [0, 4, 1]
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *_, **__: drawn.append(self)
    )
    find_bottleneck.plot(ranks, str(tmp_path / "out.png"))
    last = max(b + r.span / 1e6 for b, r in zip(begins, ranks, strict=True))
    assert {axis.get_xlim() for axis in drawn[0].axes} == {(0, last)}
    first = [axis.collections[0].get_paths()[0] for axis in drawn[0].axes]
    left = [path.vertices[:, 0].min() for path in first]
    assert left == pytest.approx([0, 4, 1], abs=0.05)


def test_clocks_without_a_common_moment_are_not_compared(tmp_path):
    begins, aligned = find_bottleneck.starts_ms(
        ranks_of(tmp_path, [0, 5e8, 0])
    )
    assert not aligned and not begins.any()


def test_brief_calls_do_not_start_anything_up(tmp_path):
    made = synthetic.compute_bound()
    made.add("cuda_runtime", "cudaFuncGetAttributes", 700, 2)
    made.add("cuda_runtime", "cudaMalloc", 710, 20)
    made.add("cuda_runtime", "cudaFree", 800, 900)
    made.add("cuda_runtime", "cudaDeviceGetAttribute", 1800, 3000)
    path = tmp_path / "trace.json"
    path.write_text(made.text())
    (trace,) = traces.read([path])
    account = accounting.account(trace)
    found = {
        trace.names[name]: kind
        for lane in timeline.lanes(trace, account)
        for name, kind in zip(lane.name, lane.kind, strict=True)
    }
    assert found["cudaFuncGetAttributes"] == "runtime call"
    assert found["cudaMalloc"] == "runtime call"
    assert found["cudaFree"] == "start-up"
    assert found["cudaDeviceGetAttribute"] == "start-up"


def test_each_colour_of_a_legend_has_one_meaning(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(synthetic.start_up().text())
    (trace,) = traces.read([path])
    figure = timeline.picture(trace, accounting.account(trace), *trace.window)
    words = [[t.get_text() for t in x.get_texts()] for x in figure.legends]
    assert "idle start up" in words[0] and "start-up" in words[1]
    assert not any("," in word for legend in words for word in legend)


def test_what_changed_is_in_the_unit_that_the_cells_name(tmp_path, capsys):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(synthetic.data_bound().text())
    new.write_text(synthetic.compute_bound().text())
    find_bottleneck.main([str(new), "--against", str(old)])
    head = next(
        line.split()
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("part ") and "change" in line
    )
    assert head == ["part", "old", "new", "change"]


# ---- steps of one's own --------------------------------------------------


def test_a_step_that_raises_leaves_its_own_error():
    with pytest.raises(ZeroDivisionError):
        find_bottleneck.profile(lambda: 1 / 0)


def test_a_step_that_does_nothing_ends_in_a_report_or_a_sentence():
    try:
        report = find_bottleneck.profile(lambda: None)
    except bench.Refusal as refusal:
        assert "\n" not in str(refusal)
    else:
        assert len(report["ranks"][0]["steps"]) == 4
