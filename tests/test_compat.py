"""Private names that the package relies on are there, and a DeepSpeed without them is refused."""

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_terapipe import compat
from ds_terapipe.elastic.moves import rebuild


@pytest.mark.parametrize("name", compat.names(), ids=lambda name: name.path)
def test_name_exists_and_its_file_uses_it(name):
    word = re.split("[:.#]", name.path)[-1]
    source = (Path(compat.__file__).parent / f"{name.file}.py").read_text(encoding="utf-8")
    assert re.search(rf"\b{word}\b", source), f"{name.file} no longer uses {name.path}"
    if importlib.util.find_spec(name.package) is None:
        pytest.skip(f"{name.package} is not installed")
    assert compat.exists(name.path), f"{name.path} is gone; used by {name.file}"


def test_flat_buffers_of_deepspeed_are_read_in_one_place():
    flat = r"\b(fp32_groups(_\w+)?|(bf|bit|fp)16_groups|single_partition_of\w+|_hp_mapping|[hl]p_fragment\w*|_?param_slice_\w+)\b"
    sources = Path(compat.__file__).parent.rglob("*.py")
    assert {path.stem for path in sources if re.search(flat, path.read_text())} == {"deepspeed_state"}


def test_missing_names_are_noticed_and_none_is_listed_twice():
    engine = "deepspeed.runtime.pipe.engine:PipelineEngine"
    for path in ("deepspeed:no_such_name", "deepspeed.no_such_module:name", f"{engine}.no_such_method",
                 f"{engine}.__init__#no_such_attribute"):  # fmt: skip
        assert not compat.exists(path), path
    assert len(set(compat.names())) == len(compat.names()) > 100


@pytest.mark.parametrize(("version", "rank", "said"), [
    ("0.19.8+abc123", "0", False), ("0.19.12", "0", False), ("0.19.7", "0", True), ("0.20.0", "0", True), ("0.20.0", "1", False),
])  # fmt: skip
def test_a_version_that_no_test_ran_on_is_said_once_by_one_rank(monkeypatch, caplog, version, rank, said):
    monkeypatch.setattr("deepspeed.__version__", version)
    monkeypatch.setattr(compat, "_SAID", set())
    monkeypatch.setenv("RANK", rank)
    for _ in range(2):
        compat.require("elastic_pipeline")
    assert caplog.messages == said * [
        f"elastic_pipeline: got DeepSpeed {version}, which no test has run on, use pip install 'deepspeed>=0.19.8,<0.20' where "
        "something fails"
    ]


def test_another_megatron_is_said_and_used_and_one_that_does_not_fit_refused_in_one_line(monkeypatch, caplog):
    def imported():
        for name in [name for name in sys.modules if name.startswith("ds_terapipe.megatron")]:
            monkeypatch.delitem(sys.modules, name)
        return importlib.import_module("ds_terapipe.megatron")

    monkeypatch.setattr("megatron.core.__version__", "0.21.0")
    monkeypatch.setattr(compat, "_SAID", set())
    assert callable(imported().gpt_pipeline)
    (line,) = caplog.messages
    assert line.startswith("ds_terapipe.megatron: got megatron-core 0.21.0, which no test has run on, use pip install ")
    monkeypatch.setitem(sys.modules, "megatron.core.models.gpt.gpt_layer_specs", None)
    text = r"megatron-core 0\.21\.0 does not fit .*gpt_layer_specs.*, must be 0\.16 or newer"
    with pytest.raises(ImportError, match=text) as raised:
        imported()
    assert "\n" not in str(raised.value)


# Attributes that DeepSpeed's constructor makes again for another shape: from the configuration, the module and its grid, or
# as at the begin of a step, or that a step makes.
REBUILT = """_autoep_folding_group_handles _autoep_folding_spec _compile_kwargs _compile_mode _compiled_regions _compute_loss
_config _configure_zenflow _curr_ckpt_path _deepcompile_active _deepcompile_native_initialized _exec_instr _force_grad_boundary
_grad_layer_buf _is_compiled _is_compiled_autograd_enabled _is_gradient_accumulation_boundary _is_zenflow_update_boundary
_manual_backward_expected _running_engine_backward _running_engine_backward_count _running_engine_backward_lock
_running_engine_step _step_applied _support_torch_style_backward _sync_zenflow_optimizer_lr _unmanaged_backward_count
_zenflow_step agg_additional_losses agg_loss all_to_all_group autotuning_model_info basic_optimizer checkpoint_engine
checkpoint_mp_rank collate_fn communication_data_type config data_parallel_group device dist_backend dont_change_device
dp_group_loss dp_world_size dynamic_shape enable_backward_allreduce engine_timers engine_timers_cache eval_return_logits
expert_data_parallel_group expert_parallel_group first_dataloader_check first_gradient_send first_output_send flatten flops
flops_profiler fwd_duration fwd_outputs gate_modules global_rank grad_layer grad_partition_grad_layer_meta_cache
gradient_average grid has_bool_tensors has_moe_layers inside_no_sync_ctxt is_data_parallel is_grad_partitioned
is_model_parallel is_pipe_parallel is_pipe_partitioned local_all_to_all_group local_rank log_batch_step_id loss losses
lr_scheduler mesh_device meta_buffer micro_batch_size micro_batches module_forward_post_hook module_forward_pre_hook moe_layers
mp_world_size mpu next_stage num_experts num_pipe_buffers num_stages optimized_linear_base_weight_sharding
optimized_linear_lora_enabled optimizer outputs param_names pipe_buffers pipe_partition_grad_meta_cache
pipe_partition_input_meta_cache pipe_partition_output_meta_cache pipe_recv_buf pipeline_enable_backward_allreduce
pipeline_parallelism prev_stage random_ltd_scheduler save_non_zero_checkpoint save_zero_checkpoint scale_wrt_gas
seq_data_parallel_group seq_dp_world_size seq_parallel_group sequence_parallel_size stage_id summary_events
torch_autocast_z0_gradscaler total_additional_losses total_loss unflatten use_ds_comm using_bf16_optimizer warn_unscaled_loss
world_size"""


def test_each_attribute_of_an_engine_is_carried_over_or_made_again_when_it_is_rebuilt():
    """All that DeepSpeed's classes of engines set, in whichever method."""
    engines = [each for each in PipelineEngine.__mro__ if each.__module__.startswith("deepspeed")]
    pattern = r"self\.(\w+)(?:: [^=\n]+)? = "
    found = {name for each in engines for name in re.findall(pattern, inspect.getsource(each))}
    assert sorted(found) == sorted([*REBUILT.split(), *rebuild.CARRIED])


COLLECTIVES = """all_gather all_gather_object all_reduce barrier broadcast broadcast_object_list gather_object irecv isend
recv_object_list reduce_scatter send_object_list"""
OF_ALL = ("WORLD", "_get_default_group", "_get_default_store", "get_world_group")


def test_only_the_job_names_the_default_group():
    """Its store, ranks and size, and the making of groups; `ds_terapipe check` pretends that there is one."""
    folder = Path(compat.__file__).parent
    for path in {*folder.rglob("*.py")} - {folder / "job.py", folder / "commands" / "checking" / "world.py"}:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.func if isinstance(node, ast.Call) else None
            name, where = getattr(called, "attr", ""), f"{path}:{getattr(node, 'lineno', 0)}"
            assert getattr(node, "attr", "") not in OF_ALL, where
            if isinstance(called, ast.Attribute) and ast.unparse(called.value) in ("dist", "torch.distributed"):
                assert name != "new_group" and (name not in ("get_rank", "get_world_size") or node.args), where
                assert name not in COLLECTIVES.split() or any(each.arg == "group" for each in node.keywords), where
