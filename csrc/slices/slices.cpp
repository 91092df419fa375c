// Linear layers and attention of slices in PyTorch's C++ autograd: the same calls of ATen as in ds_terapipe/pipeline/operators
// (deferred.py, attention.py, buffers.py), which run where this is not compiled, without Python between them. On small layers, and
// on fast devices, that Python takes longer than the kernels.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sigmoid.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;
using at::Tensor;
using std::optional;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

namespace {

template <typename Call>
c10::intrusive_ptr<Call> call_of(AutogradContext* ctx) {
  return c10::static_intrusive_pointer_cast<Call>(ctx->saved_data["call"].toCapsule());
}

// -------------------------------------------------------------------------------------------------------- weight gradients

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
    const int64_t least = one_by_one ? rules_->least_tokens : tokens;
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
      : rules_(std::make_shared<Rules>(least_tokens, std::move(outside), std::move(changed))) {}

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
Tensor products_of(const std::shared_ptr<KeptLinear>& kept, int64_t first, const optional<Tensor>& then) {
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

// A gradient that cannot be differentiated again, as by torch.autograd.function.once_differentiable.
class Once : public Function<Once> {
 public:
  static Tensor forward(AutogradContext*, const Tensor& made, const Tensor&) { return made.view_as(made); }
  static variable_list backward(AutogradContext*, variable_list) {
    TORCH_CHECK(false, "trying to differentiate twice an operator of slices, which is once_differentiable");
  }
};

// Runs the backward pass of an operator from the gradient of its outputs, without a graph. With create_graph=True it has grad mode.
template <typename Pass>
variable_list once_differentiable(const Tensor& gradient, Pass pass) {
  if (!at::GradMode::is_enabled()) return pass();
  variable_list made;
  {
    const at::NoGradGuard without_graph;
    made = pass();
  }
  for (Tensor& each : made) {
    if (each.defined() && gradient.requires_grad()) each = Once::apply(each, gradient);
  }
  return made;
}

// A result that models may write into; autograd refuses writes to a view that was made inside a function.
Tensor no_view(const Tensor& made) { return made.is_view() ? at::_unsafe_view(made, made.sizes()) : made; }

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

Tensor linear(const Tensor& input, const Tensor& weight, const optional<Tensor>& bias, const std::shared_ptr<Operands>& operands) {
  // Without a gradient of the input, an empty tensor makes autograd call backward.
  optional<Tensor> anchor;
  if (!input.requires_grad()) anchor = at::empty({0}, weight.options()).set_requires_grad(true);
  return DeferredLinear::apply(input, anchor, c10::make_intrusive<LinearCall>(weight, bias, operands));
}

// --------------------------------------------------------------------------------------------------------------- attention

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

Tensor rows_first(const Tensor& tensor) { return tensor.transpose(1, 2); }

// Views [b, heads, rows, d] as [b, kv heads, groups * rows, d].
Tensor folded(const Tensor& tensor, int64_t kv_heads) {
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

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys, const Tensor& values,
                 const std::shared_ptr<KeyGradients>& gradients, int64_t start, int64_t stop, int64_t first, const optional<Tensor>& bias,
                 double dropout, optional<double> scale, optional<int64_t> left,
                 bool by_cudnn) {
  auto call = c10::make_intrusive<AttentionCall>();
  call->keys = keys, call->values = values, call->gradients = gradients;
  call->start = start, call->stop = stop, call->first = first;
  call->bias = bias, call->dropout = dropout, call->scale = scale, call->left = left;
  call->on_cuda = q.is_cuda(), call->by_cudnn = by_cudnn;
  return SliceAttention::apply(q, k, v, call);
}

}  // namespace

PYBIND11_MODULE(_slices, module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<KeptLinear, std::shared_ptr<KeptLinear>>(module, "KeptLinear")
      .def_property_readonly("parameters", &KeptLinear::parameters)
      .def("has_from", &KeptLinear::has_from)
      .def("tensors", &KeptLinear::tensors)
      .def("node", &products_of);
  py::class_<Operands, std::shared_ptr<Operands>>(module, "Operands")
      .def(py::init<int64_t, std::string, std::string>())
      .def("begin", &Operands::begin)
      .def("end", &Operands::end)
      .def("layers", &Operands::layers)
      .def("micro_batches", &Operands::micro_batches)
      .def("clear", &Operands::clear);
  py::class_<KeyGradients, std::shared_ptr<KeyGradients>>(module, "KeyGradients")
      .def(py::init<int64_t>())
      .def_readonly("start", &KeyGradients::from)
      .def("add", &KeyGradients::add, Released());
  module.def("linear", &linear, Released());
  module.def("attention", &attention, Released());
}
