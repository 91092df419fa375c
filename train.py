"""Trains a GPT, BERT or ViT of megatron-core's layers with DeepSpeed. The arguments are Megatron's. Batch sizes and optimizer
are in the file that --deepspeed_config names."""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from ds_terapipe import shared_memory, tensor_files
from ds_terapipe.build_locks import waits_are_said
from ds_terapipe.elastic.engine import ElasticPipelineEngine
from ds_terapipe.errors import ConfigError, bad_value
from ds_terapipe.job import Job
from ds_terapipe.json_files import check_writable_folder
from ds_terapipe.manifest import Manifest
from ds_terapipe.megatron import tasks
from ds_terapipe.megatron.data import SampleIterator
from ds_terapipe.megatron.layers import NO_DOCUMENTS
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.names import ELASTIC_STATE
from ds_terapipe.pipeline.checkpoints import tag_of
from ds_terapipe.pipeline.engine import TokenPipelineEngine
from ds_terapipe.pipeline.transport.watchdog import PipelineStalled
from ds_terapipe.plan.stages import even_layers, read_layers

logger = logging.getLogger("train")

STAGE_LAYERS, SAMPLES = "stage_layers", "samples"  # what a checkpoint says of its stages, and of the whole training


def parse_arguments() -> argparse.Namespace:
    """Arguments with Megatron's names and defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=tasks.HelpFormatter)
    tasks.add_model_arguments(parser.add_argument_group("model"))
    tasks.add_text_arguments(parser.add_argument_group("GPT and BERT"))
    tasks.add_image_arguments(parser.add_argument_group("ViT"))
    _add_training_arguments(parser.add_argument_group("training"))
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    if not args.deepspeed_config:
        parser.error("--deepspeed_config is required: batch sizes and optimizer are in it, e.g. configs/demo.json")
    try:
        if args.stage_layers is not None:
            args.stage_layers = read_layers(args.stage_layers, args.num_layers, args.pipeline_model_parallel_size)
        args.task = tasks.TASKS[args.model](args)
    except ConfigError as error:
        parser.error(str(error))
    return args


def _add_training_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--tensor-model-parallel-size", type=tasks.positive, default=1, help="ranks that share each layer")
    add("--pipeline-model-parallel-size", type=tasks.positive, default=1, help="pipeline stages")
    add(
        "--stage-layers",
        metavar="N,N",
        help="Transformer layers of each stage (default: even); `ds_terapipe plan` prints them",
    )
    add(
        "--split",
        default="969,30,1",
        help="parts of the documents, or of each class, for training, validation and test",
    )
    add("--train-iters", type=tasks.positive, required=True, help="training steps")
    add("--eval-interval", type=tasks.positive, default=1000, help="steps between evaluations")
    add("--eval-iters", type=tasks.at_least(0), default=0, help="batches of an evaluation; 0: no evaluation")
    add("--log-interval", type=tasks.positive, default=10, help="steps between lines of the log")
    add("--log-file", help="file to write a line of JSON to for each step")
    add("--save", help="folder to write checkpoints to")
    add("--save-interval", type=tasks.positive, default=1000, help="steps between checkpoints")
    add("--load", help="folder to continue from; it may be empty, or missing where --save names it too")
    add("--exit-interval", type=tasks.positive, help="stop after the next step that is a multiple of this number")
    add("--seed", type=int, default=1234, help="seed of weights, data and dropout")


def parameter_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices, none for biases and norms."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


class Share(NamedTuple):
    """Share of every batch that this process reads.

    It stays as the launch has it: where ``elastic_pipeline`` changes the shape, the engine sends samples to the ranks that
    need them.
    """

    reads: bool
    replica: int
    replicas: int
    micro_batch: int | Callable[[], int]

    @classmethod
    def of(cls, engine: Any) -> Share:
        """Sizes by the engine's present shape; the schedule MixedBatch has micro-batches of its own for each phase."""
        grid = engine.grid

        def size() -> int:
            start = getattr(engine, "start_shape", None)
            return int(engine.train_micro_batch_size_per_gpu() if start is None else start.micro_batch)

        return cls(
            reads=grid.is_first_stage or grid.is_last_stage,
            replica=grid.get_data_parallel_rank(),
            replicas=grid.get_data_parallel_world_size(),
            micro_batch=size if hasattr(engine.lr_scheduler, "phases") else size(),
        )


def saved_stages(checkpoint: Path) -> list[int] | None:
    """Layers of each stage as the checkpoint in this folder was saved; None where it doesn't say.

    Raises:
        ConfigError: a file that is not whole.
    """
    states, old = checkpoint / "mp_rank_00_model_states.pt", checkpoint / f"{STAGE_LAYERS}.json"
    found = tensor_files.read("--load", states) if states.is_file() else None
    found = found.get(STAGE_LAYERS) if isinstance(found, dict) else None
    if found is None and old.is_file():
        try:
            found = json.loads(old.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"--load: got {old} ({error}), must be a whole file, use another checkpoint") from error
    return found


class Trainer:
    """The engine, where it is in the data, and what it tells about it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.task = args, args.task
        model = self.task.model()
        self.engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=parameter_groups(model))
        if args.reset_attention_mask and not isinstance(self.engine, TokenPipelineEngine):
            raise ConfigError(NO_DOCUMENTS)
        self.share = Share.of(self.engine)
        self.first = torch.distributed.get_rank() == 0
        # Dropout: another stream for each stage and replica, the same for the parts of a layer.
        torch.manual_seed(args.seed + 100 * self.engine.grid.get_stage_id() + 10 * self.share.replica)
        if args.save:
            Job.current().together(lambda: check_writable_folder("--save", args.save, "a folder that you may write to"))
        self.iteration = self._load()
        self.losses: list[float] = []  # since the last line
        validation = args.eval_iters * self.engine.train_batch_size()
        self.train_data, self.valid_data = self.task.datasets(self._samples(), validation, lambda: self.share.reads)

    def _samples(self) -> dict[int, int]:
        """Samples of the whole training by their length; the schedule MixedBatch has its own for each phase."""
        phases = getattr(self.engine.lr_scheduler, "phases", None)
        if phases is None:
            return {self.task.seq_length: self.args.train_iters * self.engine.train_batch_size()}
        samples: Counter[int] = Counter()
        for phase in phases:
            samples[phase.seq_length] += phase.steps * phase.batch_size
        return dict(samples)

    def _load(self) -> int:
        if not self.args.load:
            return 0
        folder = Path(self.args.load)
        Job.current().together(lambda: self._check_there(folder))
        self._check_stages(folder)
        try:
            path, state = self.engine.load_checkpoint(self.args.load)
        except RuntimeError as error:
            if "size mismatch" not in str(error):
                raise
            what = next(line.strip() for line in str(error).splitlines() if "size mismatch" in line)
            raise bad_value(
                "--load", str(folder), f"a checkpoint of this model ({what})", "another model or folder"
            ) from error
        if path is None:
            if self.first:
                logger.warning("no checkpoint in %s: starting from random weights", self.args.load)
            return 0
        if "iteration" not in state:
            raise bad_value("--load", path, "a checkpoint that train.py has written", "another folder")
        self._say_order(state.get(SAMPLES))
        return int(state["iteration"])

    def _say_order(self, then: dict[int, int] | None) -> None:
        """Warn where another number of samples than the checkpoint's training has changes their order."""
        now = self._samples()
        if self.first and self.task.order_of_all and then not in (None, now):
            logger.warning(
                "--train-iters: the checkpoint's training has %d samples and this one %d, and their order depends on the number: "
                "from here on some come a second time, others not at all; for the same order use the same number",
                sum(then.values()),
                sum(now.values()),
            )

    def _check_there(self, folder: Path) -> None:
        """A name that was mistyped is no reason to begin from random weights."""
        saved = self.args.save is not None and Path(self.args.save).absolute() == folder.absolute()
        if not folder.is_dir() and not saved:
            raise bad_value("--load", str(folder), "a folder with checkpoints", "the one given as --save before")

    def _check_stages(self, folder: Path) -> None:
        """Weights are saved by layer, the optimiser's state by stage: with other stages it would go to other layers.

        Rank 0 reads for all. A checkpoint that doesn't say is of a time when stages were even. One of an elastic pipeline has the
        engine's own record, from which the engine makes the stages.
        """
        if self.engine.load_universal_checkpoint() or ModelChunks(self.engine.module).is_placed:
            return  # with several stages on a place the engine compares them
        if hasattr(self.engine, "recover_checkpoint"):
            self.engine.recover_checkpoint(str(folder))
        job = Job.current()
        saved = job.gather(job.together(lambda: self._saved_stages(folder) if self.first else None))[0]
        if saved is None:
            return
        then, now = tuple(saved), self.engine.module.layers_per_stage
        must = f"as the checkpoint in {folder} was saved"
        if len(then) != len(now):
            raise bad_value("--pipeline-model-parallel-size", len(now), must, str(len(then)))
        if then != now:
            raise bad_value("--stage-layers", ",".join(map(str, now)), must, ",".join(map(str, then)))

    def _saved_stages(self, folder: Path) -> Sequence[int] | None:
        tag = tag_of(folder, None, "--load")
        if tag is None:
            return None
        checkpoint = folder / tag
        if isinstance(self.engine, ElasticPipelineEngine) and (checkpoint / ELASTIC_STATE).exists():
            return None
        manifest = Manifest.of("--load", checkpoint) if isinstance(self.engine, TokenPipelineEngine) else None
        if manifest is not None:
            manifest.check([checkpoint / "mp_rank_00_model_states.pt"])
        return saved_stages(checkpoint) or even_layers(self.args.num_layers, self.args.pipeline_model_parallel_size)

    def _save(self) -> None:
        placed = ModelChunks(self.engine.module).is_placed
        stages = None if placed else list(self.engine.module.layers_per_stage)
        state = {"iteration": self.iteration, STAGE_LAYERS: stages, SAMPLES: self._samples()}
        self.engine.save_checkpoint(self.args.save, tag=f"global_step{self.engine.global_steps}", client_state=state)

    def _batches(self, dataset: Any, consumed: int) -> SampleIterator | None:
        if not self.share.reads:
            return None
        share = self.share
        return self.task.batches(
            dataset, share.micro_batch, replica=share.replica, replicas=share.replicas, consumed=consumed
        )

    def train(self) -> None:
        """Train to ``--train-iters``, from the iteration that was loaded."""
        args = self.args
        batches = self._batches(self.train_data, self.engine.global_samples)
        if batches is not None and hasattr(self.engine.lr_scheduler, "register_dataset"):
            self.engine.lr_scheduler.register_dataset(batches)
        bar = tqdm(total=args.train_iters, initial=self.iteration, unit="it", disable=None if self.first else True)
        with logging_redirect_tqdm(), bar:
            while self.iteration < args.train_iters:
                tokens = self._tokens()
                start = time.perf_counter()
                loss = float(self.engine.train_batch(data_iter=batches))
                self.iteration += 1
                self._report(bar, loss, time.perf_counter() - start, tokens)
                if args.eval_iters and self._at(args.eval_interval):
                    self.evaluate()
                if args.save and self._at(args.save_interval):
                    self._save()
                if args.exit_interval and self.iteration % args.exit_interval == 0:
                    break

    def _tokens(self) -> int:
        """Tokens of the next step."""
        phase = getattr(self.engine.lr_scheduler, "phase", None)
        return self.engine.train_batch_size() * (self.task.seq_length if phase is None else phase.seq_length)

    def _at(self, interval: int) -> bool:
        return self.iteration % interval == 0 or self.iteration == self.args.train_iters

    def _report(self, bar: tqdm, loss: float, seconds: float, tokens: int) -> None:
        """The loss in a line of the log is the mean since the line before."""
        if not self.first:
            return
        rate = tokens / seconds
        bar.update()
        bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        self.losses.append(loss)
        if self.iteration == 1 or self._at(self.args.log_interval):
            lr, mean = self.engine.get_lr()[0], sum(self.losses) / len(self.losses)
            self.losses.clear()
            logger.info(
                f"iteration {self.iteration}/{self.args.train_iters} | loss {mean:.4f} | lr {lr:.3e} | "
                f"{seconds * 1000:.0f} ms | {rate:,.0f} tokens/s"
            )
        if self.args.log_file:
            line = {"iteration": self.iteration, "loss": loss, "seconds": seconds, "tokens_per_second": rate}
            with open(self.args.log_file, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def evaluate(self) -> None:
        """Mean loss over the first ``--eval-iters`` batches of the validation data."""
        batches = self._batches(self.valid_data, consumed=0)
        self.engine.reset_activation_shape()  # DeepSpeed's own engine sends shapes once, and a phase may have other ones
        losses = [float(self.engine.eval_batch(batches)) for _ in range(self.args.eval_iters)]
        self.engine.reset_activation_shape()
        if self.first:
            logger.info(f"iteration {self.iteration} | validation loss {sum(losses) / len(losses):.4f}")


def main() -> None:
    args = parse_arguments()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    for name in ("train", "ds_terapipe"):
        logging.getLogger(name).setLevel(logging.INFO)
    with waits_are_said():  # DeepSpeed compiles an op here
        deepspeed.init_distributed()
    shared_memory.release()
    if args.log_file and torch.distributed.get_rank() == 0:
        Path(args.log_file).parent.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args)
    trainer.train()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, PipelineStalled) as problem:  # a ConfigError is the same on every process
        raise SystemExit(f"train.py: error: {problem}") from None
