// Cross-entropy over (N, V) logits that leaves its gradient in their place.
//
// Memory traffic is what this costs: the first sweep over a row reads it from
// memory, the second finds it in the core's own cache (50,304 floats are
// 200 KB), and the result is written back once. The composite writes the
// log-softmax beside the logits, then the gradient beside both.
//
// The headers are PyTorch's stable ABI: they compile in seconds, where
// torch/extension.h takes most of a minute, and they do not depend on the
// compiler that built PyTorch.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kIgnored = -100;
// Independent partial results: a loop over them becomes vector instructions
// without -ffast-math, and four vectors of AVX-512 hide the add's latency.
constexpr int64_t kLanes = 64;
// 16 KB of floats: read twice, for its maximum and for its exponentials, a
// block comes from the first-level cache the second time.
constexpr int64_t kBlock = 4096;

float widen(float x) { return x; }
double widen(double x) { return x; }
float widen(Half x) { return static_cast<float>(x); }
float widen(BFloat16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.x) << 16);
}

void narrow(float x, float& to) { to = x; }
void narrow(double x, double& to) { to = x; }
void narrow(float x, Half& to) { to = static_cast<Half>(x); }
void narrow(float x, BFloat16& to) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = bits + 0x7FFF + ((bits >> 16) & 1);  // to even
  to.x = static_cast<uint16_t>((x != x ? bits | 0x400000 : rounded) >> 16);
}

// e^x for x <= 0 to 3 ulp, free of branches and calls so that compilers
// vectorise it; a call of expf would keep the loop scalar. NaN stays NaN.
// x = n ln 2 + r: adding 1.5 * 2^23 rounds to n, which is then found in the
// low bits of the sum. The polynomial has the least largest relative error
// on |r| <= ln 2 / 2 of those of degree 5 with e^0 = 1.
inline float exp_of(float x) {
  x = -87.7f > x ? -87.7f : x;  // n = -127, hence exactly 0
  const float shifted = x * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 8.290272135e-3f;
  p = p * r + 4.189815976e-2f;
  p = p * r + 1.666763813e-1f;
  p = p * r + 4.999914784e-1f;
  p = p * r + 9.999997063e-1f;
  p = p * r + 1.0f;
  const uint32_t power = (std::bit_cast<uint32_t>(shifted) + 127u) << 23;
  return p * std::bit_cast<float>(power);
}
inline double exp_of(double x) { return std::exp(x); }

template <class T>
using Wide = decltype(widen(T()));

template <class T>
Wide<T> largest(const T* x, int64_t n, Wide<T> most) {
  using W = Wide<T>;
  W lanes[kLanes];
  for (auto& lane : lanes) lane = most;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t k = 0; k < kLanes; ++k) {
      const W value = widen(x[i + k]);
      lanes[k] = value > lanes[k] ? value : lanes[k];
    }
  for (; i < n; ++i) {
    const W value = widen(x[i]);
    lanes[0] = value > lanes[0] ? value : lanes[0];
  }
  for (const W lane : lanes) most = lane > most ? lane : most;
  return most;
}

// Floats keep their exponentials for the second sweep; 16 bits would round
// them, so there they are computed again.
template <class T>
constexpr bool kKeeps = std::is_same_v<T, Wide<T>>;

template <class T>
double sum_of_exp(T* x, int64_t n, Wide<T> base) {
  using W = Wide<T>;
  W lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t k = 0; k < kLanes; ++k) {
      const W e = exp_of(widen(x[i + k]) - base);
      if constexpr (kKeeps<T>) x[i + k] = e;
      lanes[k] += e;
    }
  for (; i < n; ++i) {
    const W e = exp_of(widen(x[i]) - base);
    if constexpr (kKeeps<T>) x[i] = e;
    lanes[0] += e;
  }
  double sum = 0;
  for (const W lane : lanes) sum += lane;
  return sum;
}

// Turns one row into its gradient and returns the row's loss, unscaled.
// ``bases`` is room for one number per block: the largest logit so far, which
// the block's exponentials are relative to (-inf: nothing but -inf so far).
template <class T>
double one_row(T* row, int64_t V, int64_t target, double scale,
               std::vector<Wide<T>>& bases) {
  using W = Wide<T>;
  if (target == kIgnored) {
    for (int64_t i = 0; i < V; ++i) narrow(W(0), row[i]);
    return 0;
  }
  constexpr W nothing = -std::numeric_limits<W>::infinity();
  const double x = widen(row[target]);
  W most = nothing;
  double sum = 0;
  for (int64_t b = 0; b * kBlock < V; ++b) {
    T* block = row + b * kBlock;
    const int64_t n = std::min(kBlock, V - b * kBlock);
    const W base = bases[b] = largest(block, n, most);
    if (base > most) sum *= std::exp(static_cast<double>(most) - base);
    sum += sum_of_exp(block, n, base == nothing ? W(0) : base);
    most = base;
  }
  const double factor = scale / sum;
  for (int64_t b = 0; b * kBlock < V; ++b) {
    T* block = row + b * kBlock;
    const int64_t n = std::min(kBlock, V - b * kBlock);
    if constexpr (kKeeps<T>) {
      const double lift = std::exp(static_cast<double>(bases[b]) - most);
      const W by = static_cast<W>(factor * lift);
      for (int64_t i = 0; i < n; ++i) block[i] *= by;
    } else {
      const W by = static_cast<W>(factor);
      for (int64_t i = 0; i < n; ++i)
        narrow(exp_of(widen(block[i]) - most) * by, block[i]);
    }
  }
  // softmax - 1, not rounded to T in between
  narrow(static_cast<W>(std::exp(x - most) * factor - scale), row[target]);
  return std::log(sum) + (most - x);
}

template <class T>
double all_rows(Tensor& logits, const int64_t* targets, double scale) {
  const int64_t N = logits.size(0), V = logits.size(1);
  T* data = static_cast<T*>(logits.mutable_data_ptr());
  std::vector<double> losses(N);
  torch::stable::parallel_for(0, N, 1, [&](int64_t begin, int64_t end) {
    std::vector<Wide<T>> bases(V / kBlock + 1);
    for (int64_t i = begin; i < end; ++i)
      losses[i] = one_row(data + i * V, V, targets[i], scale, bases);
  });
  double sum = 0;  // in order: the same sum for any number of threads
  for (const double loss : losses) sum += loss;
  return sum * scale;
}

double value_of(const Tensor& scale) {
  STD_TORCH_CHECK(scale.is_cpu() && scale.numel() == 1,
                  "scale must be one number on the CPU");
  if (scale.scalar_type() == ScalarType::Double)
    return *static_cast<const double*>(scale.const_data_ptr());
  STD_TORCH_CHECK(scale.scalar_type() == ScalarType::Float,
                  "scale must be float32 or float64");
  return *static_cast<const float*>(scale.const_data_ptr());
}

Tensor cross_entropy_(Tensor logits, Tensor targets,
                      std::optional<Tensor> scale) {
  STD_TORCH_CHECK(logits.is_cpu() && logits.dim() == 2 &&
                      logits.is_contiguous(),
                  "logits must be a contiguous (N, V) tensor on the CPU");
  STD_TORCH_CHECK(targets.is_cpu() && targets.dim() == 1 &&
                      targets.is_contiguous() &&
                      targets.size(0) == logits.size(0) &&
                      targets.scalar_type() == ScalarType::Long,
                  "targets must be N contiguous int64 on the CPU");
  const int64_t N = logits.size(0), V = logits.size(1);
  const auto* target = static_cast<const int64_t*>(targets.const_data_ptr());
  for (int64_t i = 0; i < N; ++i)  // before anything is written
    STD_TORCH_CHECK(
        target[i] == kIgnored || (target[i] >= 0 && target[i] < V), "target ",
        target[i], " of row ", i, " is neither in [0, ", V, ") nor ",
        kIgnored);
  const double factor = scale ? value_of(*scale) : 1.0;
  const auto dtype = logits.scalar_type();
  double loss = 0;
  if (dtype == ScalarType::Float)
    loss = all_rows<float>(logits, target, factor);
  else if (dtype == ScalarType::BFloat16)
    loss = all_rows<BFloat16>(logits, target, factor);
  else if (dtype == ScalarType::Half)
    loss = all_rows<Half>(logits, target, factor);
  else if (dtype == ScalarType::Double)
    loss = all_rows<double>(logits, target, factor);
  else
    STD_TORCH_CHECK(false, "logits must be float32, bfloat16, float16 or ",
                    "float64");
  const bool is_double = dtype == ScalarType::Double;
  Tensor result = torch::stable::new_empty(
      logits, {}, is_double ? ScalarType::Double : ScalarType::Float);
  if (is_double)
    *static_cast<double*>(result.mutable_data_ptr()) = loss;
  else
    *static_cast<float*>(result.mutable_data_ptr()) = static_cast<float>(loss);
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ch09_cpu, m) {
  m.def(
      "cross_entropy_(Tensor(a!) logits, Tensor targets, Tensor? scale)"
      " -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(ch09_cpu, CPU, m) {
  m.impl("cross_entropy_", TORCH_BOX(&cross_entropy_));
}
