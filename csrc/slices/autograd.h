// Parts of operators in PyTorch's C++ autograd.
#pragma once

#include <ATen/ops/_unsafe_view.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

namespace slices {

using at::Tensor;
using std::optional;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

template <typename Call>
c10::intrusive_ptr<Call> call_of(AutogradContext* ctx) {
  return c10::static_intrusive_pointer_cast<Call>(ctx->saved_data["call"].toCapsule());
}

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
inline Tensor no_view(const Tensor& made) { return made.is_view() ? at::_unsafe_view(made, made.sizes()) : made; }

}  // namespace slices
