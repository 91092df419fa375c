// Attention of a slice over all keys so far; see attention.py, buffers.py and cudnn_attention.py.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/sigmoid.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "autograd.h"

namespace slices {

// Gradients of the keys and values of one attention call, summed over the slices; see KeyGradients in buffers.py.
class KeyGradients {
 public:
  explicit KeyGradients(int64_t total) : from(total), total_(total) {}

  std::pair<Tensor, Tensor> add(const Tensor& dk, const Tensor& dv, int64_t start, int64_t stop, int64_t first) {
    const bool begins = !dk_.defined();
    if (begins) {
      dk_ = whole(dk, stop, first), dv_ = whole(dv, stop, first);
    }
    const Tensor own_k = dk_.narrow(2, start, stop - start), own_v = dv_.narrow(2, start, stop - start);
    if (!begins) {
      if (from <= start) {  // returned before: two calls over identical keys may have been recomputed into one state
        own_k.zero_(), own_v.zero_();
      }
      dk_.narrow(2, first, stop - first).add_(dk), dv_.narrow(2, first, stop - first).add_(dv);
    }
    from = start;
    return {own_k.to(dk.scalar_type(), false, true), own_v.to(dv.scalar_type(), false, true)};
  }

  int64_t from;  // gradients of tokens from here on were returned

 private:
  Tensor whole(const Tensor& share, int64_t stop, int64_t first) const {
    const Tensor wide = share.to(share.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
    return first || stop < total_ ? at::constant_pad_nd(wide, {0, 0, first, total_ - stop}) : wide;
  }

  int64_t total_;
  Tensor dk_, dv_;
};

struct AttentionCall : torch::CustomClassHolder {
  Tensor keys, values;  // buffers [b, kv heads, S, d]
  std::shared_ptr<KeyGradients> gradients;
  int64_t start, stop, first;
  optional<Tensor> bias;  // additive [rows, columns]; without one the kernel is causal, to the lower right
  double dropout;
  optional<double> scale;
  optional<int64_t> left;  // columns before its own that a row sees
  bool on_cuda, by_cudnn;
};

inline Tensor rows_first(const Tensor& tensor) { return tensor.transpose(1, 2); }

// Views [b, heads, rows, d] as [b, kv heads, groups * rows, d].
inline Tensor folded(const Tensor& tensor, int64_t kv_heads) {
  if (tensor.size(1) == kv_heads) return tensor;
  return tensor.reshape({tensor.size(0), kv_heads, tensor.size(1) / kv_heads * tensor.size(2), tensor.size(3)});
}

// cuDNN's attention over the keys before the rows and, causal, over their own; see cudnn_attention.py.
class Cudnn {
 public:
  // Returns the output, its log-sum-exp, and seed and offset of a dropout that draws nothing.
  static variable_list forward(const Tensor& q, const Tensor& k, const Tensor& v, optional<double> scale) {
    const int64_t rows = q.size(2), before = k.size(2) - rows;
    variable_list own = attend(q, k.narrow(2, before, rows), v.narrow(2, before, rows), true, scale);
    if (!before) return own;
    const variable_list earlier = attend(q, k.narrow(2, 0, before), v.narrow(2, 0, before), false, scale);
    const Tensor weight = at::sigmoid(own[1] - earlier[1]).reshape({q.size(0), q.size(1), rows, 1});
    at::addcmul_out(own[0], at::addcmul(earlier[0], earlier[0], weight, -1.0), own[0], weight);
    own[1] = at::logaddexp(own[1], earlier[1]);
    return own;
  }

  // Returns the gradients of q, k and v from q and what forward returned.
  static std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& gradient, const variable_list& saved, const Tensor& k, const Tensor& v,
                                                     optional<double> scale) {
    const int64_t rows = gradient.size(2), before = k.size(2) - rows;
    const auto own = gradients(gradient, saved, k.narrow(2, before, rows), v.narrow(2, before, rows), true, scale);
    if (!before) return own;
    const auto [dq, dk, dv] = gradients(gradient, saved, k.narrow(2, 0, before), v.narrow(2, 0, before), false, scale);
    return {std::get<0>(own).add_(dq), at::cat({dk, std::get<1>(own)}, 2), at::cat({dv, std::get<2>(own)}, 2)};
  }

 private:
  static variable_list attend(const Tensor& q, const Tensor& k, const Tensor& v, bool is_causal, optional<double> scale) {
    const auto made = at::_scaled_dot_product_cudnn_attention(q, k, v, {}, true, 0.0, is_causal, false, scale);
    return {std::get<0>(made), std::get<1>(made), std::get<6>(made), std::get<7>(made)};
  }

  static std::tuple<Tensor, Tensor, Tensor> gradients(const Tensor& gradient, const variable_list& saved, const Tensor& k, const Tensor& v,
                                                      bool is_causal, optional<double> scale) {
    return at::_scaled_dot_product_cudnn_attention_backward(gradient, saved[0], k, v, saved[1], saved[2], saved[3], saved[4], {}, {}, {},
                                                            gradient.size(2), k.size(2), 0.0, is_causal, scale);
  }
};

// The attention of a slice [b, heads, slice, d] over all keys so far, by cuDNN or FlashAttention-2 on CUDA, by its like on a CPU.
class SliceAttention : public Function<SliceAttention> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                        const c10::intrusive_ptr<AttentionCall>& call) {
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    const auto [keys, values] = written(*call, k, v);
    if (call->by_cudnn) {
      const variable_list made = Cudnn::forward(q, keys, values, call->scale);
      ctx->save_for_backward({q, made[0], made[1], made[2], made[3]});
      return made[0];
    }
    if (call->on_cuda) {
      const Tensor query = rows_first(q), key = rows_first(keys);
      const auto [out, sums, seed, offset, debug] =
          at::_flash_attention_forward(query, key, rows_first(values), {}, {}, query.size(1), key.size(1), call->dropout, true, false,
                                       call->scale, call->left);
      ctx->save_for_backward({query, out, sums, seed, offset});
      return rows_first(out);
    }
    const Tensor query = folded(q, keys.size(1));
    const auto [out, sums] =
        at::_scaled_dot_product_flash_attention_for_cpu(query, keys, values, 0.0, !call->bias, call->bias, call->scale);
    ctx->save_for_backward({query, out, sums});
    return out.size(1) == q.size(1) ? out : out.reshape(q.sizes());
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    return once_differentiable(gradients[0], [&] { return backward_once(ctx, gradients[0]); });
  }

 private:
  static variable_list backward_once(AutogradContext* ctx, const Tensor& of_output) {
    const auto saved = ctx->get_saved_variables();
    const auto call = call_of<AttentionCall>(ctx);
    const auto [keys, values] = seen(*call);
    const Tensor& query = saved[0];
    Tensor dq, dk, dv;
    if (call->by_cudnn) {
      std::tie(dq, dk, dv) = Cudnn::backward(of_output, saved, keys, values, call->scale);
    } else if (call->on_cuda) {
      const Tensor key = rows_first(keys);
      std::tie(dq, dk, dv) = at::_flash_attention_backward(rows_first(of_output), query, key, rows_first(values), saved[1], saved[2], {}, {},
                                                           query.size(1), key.size(1), call->dropout, true, saved[3], saved[4], call->scale,
                                                           call->left);
      dq = rows_first(dq), dk = rows_first(dk), dv = rows_first(dv);
    } else {
      const Tensor gradient = folded(of_output, keys.size(1)).contiguous();
      std::tie(dq, dk, dv) = at::_scaled_dot_product_flash_attention_for_cpu_backward(gradient, query, keys, values, saved[1], saved[2], 0.0,
                                                                                      !call->bias, call->bias, call->scale);
      dq = dq.reshape(of_output.sizes());
    }
    const auto [own_k, own_v] = call->gradients->add(dk, dv, call->start, call->stop, call->first);
    return {dq, own_k, own_v, Tensor()};
  }

  static std::pair<Tensor, Tensor> written(const AttentionCall& call, const Tensor& k, const Tensor& v) {
    // The buffers' views are nothing to autograd. Beside views, only copy_ is called: modes would see composite operators whole.
    const at::AutoDispatchBelowADInplaceOrView below;
    call.keys.narrow(2, call.start, call.stop - call.start).copy_(k);
    call.values.narrow(2, call.start, call.stop - call.start).copy_(v);
    return seen(call);
  }

  static std::pair<Tensor, Tensor> seen(const AttentionCall& call) {
    return {call.keys.narrow(2, call.first, call.stop - call.first), call.values.narrow(2, call.first, call.stop - call.first)};
  }
};

inline Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys, const Tensor& values,
                        const std::shared_ptr<KeyGradients>& gradients, int64_t start, int64_t stop, int64_t first,
                        const optional<Tensor>& bias, double dropout, optional<double> scale, optional<int64_t> left, bool by_cudnn) {
  auto call = c10::make_intrusive<AttentionCall>();
  call->keys = keys, call->values = values, call->gradients = gradients;
  call->start = start, call->stop = stop, call->first = first;
  call->bias = bias, call->dropout = dropout, call->scale = scale, call->left = left;
  call->on_cuda = q.is_cuda(), call->by_cudnn = by_cudnn;
  return SliceAttention::apply(q, k, v, call);
}

}  // namespace slices
