// Linear layers whose weight gradients are made at the end of their micro-batch; see deferred.py and weight_gradients.py.
#pragma once

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "autograd.h"

namespace slices {

// What all layers share: tokens below which operands are joined for a product, and the texts of errors.
struct Rules {
  int64_t least_tokens;
  std::string outside, changed;
};

// Operands of one linear layer's weight gradients in a micro-batch, in the order of the backward pass; see _Kept.
class KeptLinear {
 public:
  struct Slice {
    int64_t index;
    Tensor inputs, gradient;
    int64_t inputs_version, gradient_version;
  };

  KeptLinear(Tensor weight, optional<Tensor> bias, std::shared_ptr<const Rules> rules)
      : weight(std::move(weight)), bias(std::move(bias)), rules_(std::move(rules)) {}

  bool is_of(const Tensor& of_weight, const optional<Tensor>& of_bias) const {
    return weight.is_same(of_weight) && bias.has_value() == of_bias.has_value() && (!bias || bias->is_same(*of_bias));
  }

  void add(int64_t slice, const Tensor& inputs, const Tensor& gradient) {
    slices_.push_back({slice, inputs, gradient, inputs._version(), gradient._version()});
  }

  bool has_from(int64_t first) const {
    return std::any_of(slices_.begin(), slices_.end(), [&](const Slice& slice) { return slice.index >= first; });
  }

  variable_list parameters() const { return bias ? variable_list{weight, *bias} : variable_list{weight}; }

  variable_list tensors() const {
    variable_list all;
    for (const Slice& slice : slices_) all.insert(all.end(), {slice.inputs, slice.gradient});
    return all;
  }

  // Returns the gradients of the weight and of the bias, undefined without one, and frees the operands one by one.
  std::pair<Tensor, Tensor> take(int64_t first) {
    const auto begin = std::stable_partition(slices_.begin(), slices_.end(), [&](const Slice& slice) { return slice.index < first; });
    std::vector<Slice> taken(std::make_move_iterator(begin), std::make_move_iterator(slices_.end()));
    slices_.erase(begin, slices_.end());
    int64_t tokens = 0;
    for (const Slice& slice : taken) {
      if (slice.inputs._version() != slice.inputs_version || slice.gradient._version() != slice.gradient_version) {
        throw std::runtime_error(rules_->changed);
      }
      tokens += slice.gradient.size(0);
    }
    const bool one_by_one = weight.is_cpu() && (weight.scalar_type() == at::kFloat || weight.scalar_type() == at::kDouble);
    const int64_t least = one_by_one ? rules_->least_tokens : std::max<int64_t>(tokens, 1);  // all may have no token, as an expert's
    Tensor of_weight, of_bias;
    for (auto next = taken.begin(); next != taken.end();) {
      variable_list inputs, gradients;
      for (int64_t rows = 0; next != taken.end() && rows < least; ++next) {
        rows += next->gradient.size(0);
        inputs.push_back(std::move(next->inputs)), gradients.push_back(std::move(next->gradient));
      }
      const Tensor input = joined(std::move(inputs)), gradient = joined(std::move(gradients));
      of_weight = of_weight.defined() ? of_weight.addmm_(gradient.t(), input) : at::mm(gradient.t(), input);
      if (bias) of_bias = of_bias.defined() ? of_bias.add_(gradient.sum(0)) : gradient.sum(0);
    }
    return {of_weight, of_bias};
  }

  const Tensor weight;
  const optional<Tensor> bias;

 private:
  static Tensor joined(variable_list&& parts) { return parts.size() == 1 ? parts[0] : at::cat(std::exchange(parts, {})); }

  const std::shared_ptr<const Rules> rules_;
  std::vector<Slice> slices_;
};

// The linear layers' operands by micro-batch.
class Operands {
 public:
  Operands(int64_t least_tokens, std::string outside, std::string changed)
      : rules_(std::make_shared<Rules>(Rules{least_tokens, std::move(outside), std::move(changed)})) {}

  // The running backward pass: what is kept belongs to this slice, until end().
  void begin(int64_t micro_batch, int64_t slice) { micro_batch_ = micro_batch, slice_ = slice, running_ = true; }
  void end() { running_ = false; }

  // Keeps inputs [tokens, in] and the gradient of the outputs [tokens, out].
  void keep(const Tensor& weight, const optional<Tensor>& bias, const Tensor& inputs, const Tensor& gradient) {
    TORCH_CHECK(running_, rules_->outside);
    const std::lock_guard<std::mutex> lock(mutex_);  // a model on two devices runs backward in two threads
    auto& layers = kept_[micro_batch_];
    auto layer = std::find_if(layers.begin(), layers.end(), [&](const auto& each) { return each->is_of(weight, bias); });
    if (layer == layers.end()) layer = layers.insert(layers.end(), std::make_shared<KeptLinear>(weight, bias, rules_));
    (*layer)->add(slice_, inputs, gradient);
  }

  std::vector<std::shared_ptr<KeptLinear>> layers(int64_t micro_batch) const {
    const auto found = kept_.find(micro_batch);
    return found == kept_.end() ? std::vector<std::shared_ptr<KeptLinear>>() : found->second;
  }

  // Micro-batches that have operands.
  std::vector<int64_t> micro_batches() const {
    std::vector<int64_t> numbers;
    for (const auto& [number, layers] : kept_) numbers.push_back(number);
    return numbers;
  }

  void clear() { kept_.clear(); }

 private:
  std::shared_ptr<const Rules> rules_;
  bool running_ = false;
  int64_t micro_batch_ = 0, slice_ = 0;
  std::mutex mutex_;
  std::map<int64_t, std::vector<std::shared_ptr<KeptLinear>>> kept_;
};

struct ProductsCall : torch::CustomClassHolder {
  ProductsCall(std::shared_ptr<KeptLinear> kept, int64_t first) : kept(std::move(kept)), first(first) {}
  const std::shared_ptr<KeptLinear> kept;
  const int64_t first;
};

// Node of a linear layer: nothing forward, the gradients of its parameters backward; see _Products in weight_gradients.py.
class Products : public Function<Products> {
 public:
  static Tensor forward(AutogradContext* ctx, const optional<Tensor>&, const Tensor& weight, const optional<Tensor>&,
                        const c10::intrusive_ptr<ProductsCall>& call) {
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    return at::empty({0}, weight.options());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list&) {
    const auto call = call_of<ProductsCall>(ctx);
    auto [of_weight, of_bias] = call->kept->take(call->first);
    return {Tensor(), std::move(of_weight), std::move(of_bias), Tensor()};
  }
};

// Returns an empty tensor whose backward makes the layer's gradients, and runs that of `then` after it.
inline Tensor products_of(const std::shared_ptr<KeptLinear>& kept, int64_t first, const optional<Tensor>& then) {
  return Products::apply(then, kept->weight, kept->bias, c10::make_intrusive<ProductsCall>(kept, first));
}

struct LinearCall : torch::CustomClassHolder {  // hidden from autograd: an edge to a weight would run its hooks slice by slice
  LinearCall(Tensor weight, optional<Tensor> bias, std::shared_ptr<Operands> operands)
      : weight(std::move(weight)), bias(std::move(bias)), operands(std::move(operands)) {}

  optional<Tensor> trained_bias() const { return bias && bias->requires_grad() ? bias : std::nullopt; }

  const Tensor weight;
  const optional<Tensor> bias;
  const std::shared_ptr<Operands> operands;
};

class DeferredLinear : public Function<DeferredLinear> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& input, const optional<Tensor>& anchor,
                        const c10::intrusive_ptr<LinearCall>& call) {
    ctx->save_for_backward({input, call->weight});  // the weight is saved so that autograd raises if it changes meanwhile
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    return no_view(at::linear(input, call->weight, call->bias));
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    return once_differentiable(gradients[0], [&] { return backward_once(ctx, gradients[0]); });
  }

 private:
  static variable_list backward_once(AutogradContext* ctx, const Tensor& gradient) {
    const auto saved = ctx->get_saved_variables();
    const auto call = call_of<LinearCall>(ctx);
    const Tensor &input = saved[0], &weight = saved[1];
    const Tensor rows = gradient.reshape({-1, gradient.size(-1)});
    // Detached: the operands must not hold the slice's graph. One row may also become the gradient of a bias, in place.
    call->operands->keep(call->weight, call->trained_bias(), input.detach().reshape({-1, input.size(-1)}),
                         rows.size(0) == 1 ? rows.clone() : rows);
    if (!ctx->needs_input_grad(0)) return {Tensor(), Tensor(), Tensor()};
    return {at::mm(rows, weight).view(input.sizes()), Tensor(), Tensor()};
  }
};

inline Tensor linear(const Tensor& input, const Tensor& weight, const optional<Tensor>& bias, const std::shared_ptr<Operands>& operands) {
  // Without a gradient of the input, an empty tensor makes autograd call backward.
  optional<Tensor> anchor;
  if (!input.requires_grad()) anchor = at::empty({0}, weight.options()).set_requires_grad(true);
  return DeferredLinear::apply(input, anchor, c10::make_intrusive<LinearCall>(weight, bias, operands));
}

}  // namespace slices
