"""The training loop: builds every part from one config, steps, measures, validates, saves and resumes."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from titanlite.checkpoint.initial import load_weights
from titanlite.checkpoint.lock import WORKER_LOCK, lock_folder
from titanlite.checkpoint.manager import CheckpointManager
from titanlite.config.layout import parameter_counts, plan_batch, plan_pipeline
from titanlite.config.load import dump
from titanlite.config.problems import InputError, Problem
from titanlite.config.schema import Config
from titanlite.data.loader import Batch, ValidationData, build_train_loader
from titanlite.data.phase import first_phase, resume
from titanlite.data.prepare import prepare
from titanlite.files import write_atomically
from titanlite.identity import check_ranks_agree, check_same_run, check_train_state
from titanlite.lifeline import NO_REASON, StopRequest, describe, has_launcher
from titanlite.metrics.logger import MetricsLogger
from titanlite.metrics.throughput import Throughput, bf16_slower_than_fp32, peak_flops
from titanlite.model.flops import flops_per_token
from titanlite.model.loss import IGNORED
from titanlite.optim.optimizer import AdamW
from titanlite.optim.schedule import lr_at
from titanlite.parallel.parallelize import DTYPES, parallelize
from titanlite.parallel.runtime import Ranks


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm of a step was NaN or infinite. The step's update was not applied."""


class NotSavedError(RuntimeError):
    """The run was told to save and end, and cannot save."""


@dataclass
class TrainState:
    """All of a run's state that is not a tensor; saved as JSON in every checkpoint.

    step:         optimizer steps done
    samples:      samples consumed; the next step takes samples [samples, samples + global_batch_size)
    tokens:       tokens consumed
    resumed_from: the checkpoint that the run was told to start from (checkpoint.resume = PATH), if it was
    init_from:    the folder whose weights it started with (checkpoint.init_from), if it did not start with new ones
    max_position_embeddings: what a model of Hugging Face that these come from was good for, tokens; 0: no such model
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    resumed_from: str = ""
    init_from: str = ""
    max_position_embeddings: int = 0


class DeferredScalars:
    """A few device scalars whose copy to the host is begun now and waited for later, so that no step waits for it."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        device_values = torch.stack([value.to(torch.float64) for value in values])
        self._event: torch.cuda.Event | None = None
        if device_values.is_cuda:
            self._host = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
            self._host.copy_(device_values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = device_values

    def get(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


@dataclass
class PendingStep:
    """A step that was launched and whose numbers the host has not read yet."""

    state: TrainState
    lr: float
    scalars: DeferredScalars  # loss (mean over the valid targets), norm, 1.0 if not finite, StopRequest.reason, others
    others: tuple[str, ...]  # names of the other scalars, as a row has them
    measured: Callable[[], dict[str, float]]  # reads what the form of parallelism adds to a row


class Trainer:
    """stop: what asks this rank to save and end; what any rank is asked to do, all do after the same step."""

    def __init__(self, config: Config, ranks: Ranks, stop: StopRequest | None = None) -> None:
        self.config = config
        self.ranks = ranks
        self.folder = Path(config.run.output_dir) / config.run.name
        self.state = TrainState()
        self.pending: PendingStep | None = None
        self._stop_request = stop or StopRequest()
        self._stop_reason = NO_REASON  # agreed upon
        self.metrics: MetricsLogger | None = None
        self.first_step_of_process = True
        self._lock = lock_folder(self.folder, WORKER_LOCK, wait_seconds=10) if ranks.is_main else None

        self._build_data()
        self._build_checkpoints()
        self._read_resume_point()
        if self.finished:
            return
        self._build_model()
        self._load_checkpoint()
        self._build_loader()
        self._write_config()
        self._build_metrics()

    # ---- build steps -------------------------------------------------------------------------------------------

    def _build_data(self) -> None:
        config = self.config
        self.prepared = prepare(
            config.data,
            config.tokenizer,
            config.model.vocab_size,
            config.training.seq_len,
            report=(lambda message: None) if has_launcher() else self._say,  # which has shown it already
            validation=config.validation.enable,
        )
        self.data = first_phase(self.prepared, seq_len=config.training.seq_len, seed=config.run.seed)
        check_ranks_agree(config, self.data.fingerprint, self.ranks)
        self.validation = None
        if config.validation.enable:
            self.validation = ValidationData(self.prepared, config.training.seq_len, config.validation.samples)
            self.token_bytes = self.validation.token_bytes.to(self.ranks.device)

    def _build_checkpoints(self) -> None:
        self.checkpoints = None
        if self.config.checkpoint.enable:
            self.checkpoints = CheckpointManager(
                self.config.checkpoint, self.folder / "checkpoints", self.ranks, report=self._say
            )

    def _read_resume_point(self) -> None:
        """Finds the checkpoint to resume from and takes its train state; the tensors are loaded once they exist."""
        self.resume_path = self.checkpoints.find_resume() if self.checkpoints else None
        if self.resume_path is None:
            return
        assert self.checkpoints is not None
        manifest = self.checkpoints.read_manifest(self.resume_path)
        if self.config.checkpoint.resume != "auto":
            manifest["train_state"]["resumed_from"] = str(Path(self.config.checkpoint.resume).resolve())
        check_train_state(manifest, self.resume_path)
        for difference in check_same_run(manifest, self.resume_path, config=self.config, data=self.data):
            self._say(f"resume: {difference}")
        train_state = manifest["train_state"]
        self.state = TrainState(**{f.name: train_state.get(f.name, f.default) for f in dataclasses.fields(TrainState)})
        self.data, changes = resume(train_state, self.data)
        for change in changes:
            self._say(change)

    def _write_config(self) -> None:
        """Only now is it known that the run may go on: a refused start leaves the run's description alone."""
        if self.ranks.is_main:
            write_atomically(self.folder / "config.toml", dump(self.config).encode())

    def _build_metrics(self) -> None:
        config, ranks = self.config, self.ranks
        self.metrics = MetricsLogger(
            self.folder,
            config.metrics,
            main=ranks.is_main,
            resumed_step=self.state.step,
            total_steps=config.training.steps,
        )
        dtype = DTYPES[config.training.mixed_precision_param]
        if ranks.device.type == "cpu" and dtype is torch.bfloat16:
            slower = bf16_slower_than_fp32(ranks.device, ranks)
            if slower > 1.0:
                self._say(
                    f"warning: bfloat16 matmuls are {slower:.1f} times slower than float32 ones on this CPU; "
                    "--training.mixed_precision_param float32 is faster"
                )
        flops = flops_per_token(config.model, config.training.seq_len)
        peak = peak_flops(ranks.device, dtype, config.metrics, ranks)
        self.throughput = Throughput(
            flops_per_token=flops.palm,
            causal_flops_per_token=flops.causal,
            peak=peak,
            world_size=ranks.world_size,
            device=ranks.device,
        )
        self._say(f"MFU is the share of {peak}")

    def _build_model(self) -> None:
        config, ranks = self.config, self.ranks
        self.model = parallelize(
            config.model,
            config.training,
            config.parallelism,
            config.activation_checkpoint,
            config.compile,
            seed=config.run.seed,
            ranks=ranks,
        )
        self.parameters = self.model.parameters
        self.optimizer = AdamW(self.parameters, config.optimizer)
        counts = parameter_counts(config.model)
        active = f" ({counts.active:,} active)" if counts.active < counts.total else ""
        self._say(f"{counts.total:,} parameters{active}, {ranks.world_size} x {ranks.device.type}")

    def _load_checkpoint(self) -> None:
        """The checkpoint to resume from; if there is none, the weights to start from."""
        init_from = self.config.checkpoint.init_from
        if self.resume_path is None:
            if init_from:
                self._load_weights(init_from)
            return
        assert self.checkpoints is not None
        self.ranks.doing(f"loading {self.resume_path}")
        tables: dict[str, tuple[int, int]] = {}  # by key, as in _tensors
        for fqn, rows in self.config.model.padded_tables.items():
            keys = (f"model.{fqn}", f"optimizer.{fqn}.exp_avg", f"optimizer.{fqn}.exp_avg_sq")
            tables |= dict.fromkeys(keys, rows)
        self.checkpoints.load(self.resume_path, self._tensors(), tables)
        self.optimizer.n_updates = self.state.step
        self._say(f"resumed from {self.resume_path}: step {self.state.step}, sample {self.state.samples}")
        if init_from:
            self._say("checkpoint.init_from was not read: it is what a run starts from that has nothing to resume")

    def _load_weights(self, path: str) -> None:
        """Also with checkpoint.enable = false, which turns off saving and resuming."""
        self.ranks.doing(f"loading the weights of {path}")
        weights = load_weights(
            Path(path),
            self.config.model,
            self.parameters | self.model.buffers,
            self.ranks.object_channel(),
            allow_rope_change=self.config.checkpoint.allow_rope_change,
            report=self._say,
        )
        self.state.init_from = str(weights.folder.resolve())
        self.state.max_position_embeddings = weights.max_position_embeddings
        self._say(f"weights of {self.state.init_from}: all else starts anew")

    def _build_loader(self) -> None:
        training, ranks = self.config.training, self.ranks
        pipeline = plan_pipeline(self.config.model, self.config.parallelism)
        plan = plan_batch(training, ranks.layout, pipeline)
        self.local_batch_size = plan.local_batch_size  # in force: training.local_batch_size may be far above it
        self.loader = build_train_loader(
            self.prepared,
            self.data.order(self.config.data.epochs),
            seq_len=training.seq_len,
            global_batch_size=training.global_batch_size,
            data_rank=ranks.data_rank,
            data_size=ranks.data_size,
            local_batch_size=plan.local_batch_size,
            start_sample=self.state.samples,
            num_workers=self.config.data.num_workers,
            pin_memory=ranks.device.type == "cuda",
        )
        if self.loader.steps_left == 0 and self.state.step == 0:
            epochs, batch = self.config.data.epochs, training.global_batch_size
            got = f"{epochs}, in which there is not one step of {batch} samples"
            fix = "raise it, take more text, or lower training.global_batch_size"
            raise InputError(Problem("", "data.epochs", got, "enough epochs for a step, or 0 for no limit", fix))

    # ---- the loop ----------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return self.state.step >= self.config.training.steps

    @property
    def ending(self) -> bool:
        """No step follows: training.steps are done, or data.epochs are used up."""
        return self.finished or self.loader.steps_left == 0

    @property
    def stopped(self) -> bool:
        """The run has been told to end before its end. Once train() returns, nothing of it is lost."""
        return self._stop_reason != NO_REASON and not self.ending

    def train(self) -> None:
        if self.finished:
            self._say(
                f"nothing to do: {self.folder} has done {self.state.step} steps, and training.steps is "
                f"{self.config.training.steps}. To go on: --training.steps N with N above {self.state.step}. "
                "To start anew: --run.name OTHER."
            )
            return
        gc_freq = self.config.training.gc_freq
        if gc_freq:
            gc.disable()  # ranks that collect at different moments wait for each other
            gc.collect()
        self._agree_to_stop()
        self.throughput.reset()
        while not (self.ending or self.stopped):
            self.ranks.doing(f"step {self.state.step + 1}")
            waited = time.perf_counter()
            microbatches = next(self.loader)
            waited = time.perf_counter() - waited
            previous, self.pending = self.pending, None
            self.train_step(microbatches)
            if previous is not None:
                self._report(previous)
            self.throughput.step(self.tokens_per_step, waited)
            self._after_step()
            if gc_freq and self.state.step % gc_freq == 0:
                gc.collect(1)
        self._end()

    def train_step(self, microbatches: Sequence[Batch]) -> None:
        """One optimizer step on this rank's slice of the step's samples. Nothing in it waits for the device."""
        config = self.config
        lr = lr_at(self.state.step + 1, config.optimizer.lr, config.lr_scheduler)
        batches = [self.model.shard(batch) for batch in microbatches]
        loss_sum = self.model.forward_backward(batches)
        targets = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)  # on the host, as labels are
        totals = self.ranks.sum_over_data(torch.stack([loss_sum, loss_sum.new_full((), targets)]))
        loss = totals[0] / totals[1]
        stats = self.model.finish_gradients(totals[1], config.training.max_norm)
        found_inf = torch.where(torch.isfinite(loss), stats.found_inf, 1.0)
        self.optimizer.step(lr, stats.grad_scale, found_inf)
        others = self.model.finish_step(found_inf)
        self.model.zero_grad()
        stop = self.ranks.max_over_world(self._stop_wish())

        self.state.step += 1
        self.state.samples += config.training.global_batch_size
        self.state.tokens += self.tokens_per_step
        scalars = DeferredScalars([loss, stats.norm, found_inf, stop, *others.values()])
        measured = self.model.metrics()
        self.pending = PendingStep(dataclasses.replace(self.state), lr, scalars, tuple(others), measured)

    @property
    def tokens_per_step(self) -> int:
        return self.config.training.global_batch_size * self.config.training.seq_len

    def _after_step(self) -> None:
        """Validation and checkpoints. Both first read the step's own numbers, so that a bad step is never saved."""
        config, step, last = self.config, self.state.step, self.ending
        if self.first_step_of_process:
            self.first_step_of_process = False
            self.ranks.use_train_timeout()
        validate = self.validation is not None and (step % config.validation.freq == 0 or last)
        save = self.checkpoints is not None and (step % config.checkpoint.interval == 0 or last)
        # On a CPU the step is over when train_step returns: there is nothing to wait for, and no reason to wait.
        if validate or save or last or self.ranks.device.type == "cpu":
            self._flush(self.validate if validate else None)
        if save:
            self.save(wait=last)
        elif self.checkpoints is not None:
            self.checkpoints.poll()
        if validate or save:
            self._agree_to_stop()

    def _end(self) -> None:
        self._flush()
        if self.stopped and not self.first_step_of_process:
            if self.checkpoints is None:
                raise NotSavedError(
                    f"stopped at step {self.state.step} by {describe(self._stop_reason)}; nothing is saved, as "
                    "checkpoint.enable is false"
                )
            self.save(wait=True)
        if self.checkpoints is not None:
            self.checkpoints.finish()
        self.loader.close()
        gc.enable()
        step, epochs = self.state.step, self.config.data.epochs
        if self.finished:
            self._say(f"finished at step {step}: {self.folder}")
        elif self.stopped:
            self._say(f"stopped at step {step} by {describe(self._stop_reason)}: nothing is lost")
        else:
            self._say(
                f"ended at step {step}: less than a step is left of the data's {epochs} epochs "
                f"({self.state.samples} samples are used). To go on: raise data.epochs, or set it to 0 for no limit."
            )
        assert self.metrics is not None
        self.metrics.close()

    # ---- the end before the end --------------------------------------------------------------------------------

    def _stop_wish(self) -> Tensor:
        return torch.full((), self._stop_request.reason, dtype=torch.float32, device=self.ranks.device)

    def _agree_to_stop(self) -> None:
        """Where the host waits for the device anyway: at the start, and after what may have taken minutes."""
        self._agreed_to_stop(int(self.ranks.max_over_world(self._stop_wish()).item()))

    def _agreed_to_stop(self, reason: int) -> None:
        """reason: one that all ranks have; the first that there is counts."""
        if reason != NO_REASON and self._stop_reason == NO_REASON:
            self._stop_reason = reason
            self._stop_request.tell_agreed()

    # ---- validation --------------------------------------------------------------------------------------------

    def validate(self) -> dict[str, float]:
        """The mean loss in nats a token, and in bits a byte of text, over a fixed set of held-out samples."""
        assert self.validation is not None
        self.ranks.doing(f"the validation after step {self.state.step}")
        with self.throughput.pause():
            sums = torch.zeros(3, dtype=torch.float64, device=self.ranks.device)  # nats, targets, bytes
            for batch in self.validation.batches(self.ranks.data_rank, self.ranks.data_size, self.local_batch_size):
                part = self.model.shard(batch)
                batch = {key: value.to(self.ranks.device, non_blocking=True) for key, value in part.items()}
                labels = batch["labels"]
                valid = labels != IGNORED
                sums[0] += self.model.evaluate(batch)
                sums[1] += valid.sum()
                sums[2] += (self.token_bytes[labels.clamp_min(0)] * valid).sum()
            nats, targets, text_bytes = self.ranks.sum_over_data(sums).tolist()
        return {
            "validation_loss": nats / targets,
            "validation_bits_per_byte": nats / math.log(2) / text_bytes if text_bytes else math.nan,
        }

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def save(self, *, wait: bool) -> None:
        assert self.checkpoints is not None
        assert self.pending is None, "a step must be known to be finite before it is saved"
        manifest = {
            "layout": dataclasses.asdict(self.ranks.layout),
            "config": self.config.model_dump(mode="json"),
            "train_state": {
                **dataclasses.asdict(self.state),
                "data_fingerprint": self.data.fingerprint,
                "data": self.data.record(),
            },
        }
        self.ranks.doing(f"the save of step {self.state.step}")
        with self.throughput.pause():
            self.checkpoints.save(self.state.step, self._tensors(), manifest, wait=wait)

    def _tensors(self) -> dict[str, Tensor]:
        state = self.parameters | self.model.buffers
        model = {f"model.{fqn}": tensor.detach() for fqn, tensor in state.items()}
        moments = {f"optimizer.{key}": value for key, value in self.optimizer.state_tensors().items()}
        return model | moments

    # ---- reports -----------------------------------------------------------------------------------------------

    def _report(self, done: PendingStep, validate: Callable[[], dict[str, float]] | None = None) -> None:
        """Reads a launched step's numbers, stops all ranks if they are not finite, logs them when it is time."""
        loss, norm, not_finite, stop, *others = done.scalars.get()
        step = done.state.step
        self._agreed_to_stop(int(stop))
        if not_finite:
            if self.checkpoints is not None:
                self.checkpoints.finish()
            raise NonFiniteError(
                f"step {step}: loss {loss}, gradient norm {norm}. The update was skipped and nothing was saved since. "
                "Start again to resume from the last checkpoint; a lower optimizer.lr or training.max_norm may help."
            )
        extra = validate() if validate else {}
        last = step == self.state.step and (self.ending or self.stopped)
        if not extra and step % self.config.metrics.log_freq and step != 1 and not last:
            return
        row = {
            "step": step,
            "time": time.time(),
            "loss": loss,
            "grad_norm": norm,
            "lr": done.lr,
            "samples": done.state.samples,
            "tokens": done.state.tokens,
            **dict(zip(done.others, others, strict=True)),
            **self.throughput.row(),
            **done.measured(),
            **(self.checkpoints.metrics() if self.checkpoints else {}),
            **extra,
        }
        assert self.metrics is not None
        self.metrics.log(row)

    def _flush(self, validate: Callable[[], dict[str, float]] | None = None) -> None:
        if self.pending is not None:
            done, self.pending = self.pending, None
            self._report(done, validate)

    def _say(self, message: str) -> None:
        if not self.ranks.is_main:
            return
        if self.metrics is None:
            print(message, flush=True)
        else:
            self.metrics.message(message)
