"""`ExpertIterationTrainer`: sample, keep the responses that verify, fine-tune on them with `SFTTrainer`, repeat."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from accelerate.utils import is_peft_model, set_seed
from datasets import Dataset
from transformers import Trainer, TrainerState
from transformers.hf_argparser import HfArg

from trl_ext.files import write_json, write_json_lines
from trl_ext.resilience import checkpoints
from trl_ext.rewards.verified import Grader, count_categories
from trl_ext.rollouts import SamplingSettings, TransformersEngine, VLLMEngine, response_entropies
from trl_ext.rollouts.responses import evaluate_reasoning
from trl_ext.trainers.callbacks import MetricsFileCallback, read_metrics
from trl_ext.trainers.defaults import check_at_least, configuration
from trl_ext.trainers.policies import trained_policy
from trl_ext.trainers.sft import SFTConfig, SFTTrainer
from trl_ext.trainers.trl_settings import refuse_given

# Its checkpoints have no optimizer, since each round begins with a new one.
ROUND_FILE = "expert_step.json"


@dataclass
class ExpertIterationConfig(SFTConfig):
    """Configuration of `ExpertIterationTrainer`: the fields of `SFTConfig` except its length, and those below.

    Raises:
        ValueError: a value is out of range, or a setting is given that each round chooses itself.
    """

    n_steps: int = HfArg(default=5, help="Rounds of sampling, keeping what is correct, and fine-tuning.")
    questions_per_step: int = HfArg(default=512, help="Questions drawn for each round.")
    rollouts_per_question: int = HfArg(default=4, help="Responses sampled to each question.")
    sft_epochs: int = HfArg(default=1, help="Passes over the kept responses of a round.")
    max_per_question: int | None = HfArg(
        default=None, help="Keep at most so many different correct responses to a question."
    )
    use_vllm: bool = HfArg(default=False, help="Sample with vLLM; one process, all parameters.")
    vllm_gpu_memory_utilization: float = HfArg(default=0.3, help="Share of the GPU's memory for vLLM.")
    save_strategy: str = HfArg(
        default="no", help="Not used: every round ends with a checkpoint, of which save_total_limit stay."
    )

    def __post_init__(self):
        counts = ("n_steps", "questions_per_step", "rollouts_per_question", "sft_epochs", "max_per_question")
        check_at_least(self, dict.fromkeys(counts, 1))
        refuse_given(self, dict.fromkeys(("save_strategy", "load_best_model_at_end"), "every round has a checkpoint"))
        if self.max_steps != -1 or self.num_train_epochs not in (3.0, self.sft_epochs):
            raise ValueError("max_steps and num_train_epochs are not used: give n_steps and sft_epochs")
        self.num_train_epochs = self.sft_epochs
        super().__post_init__()


Row = Mapping[str, Any]


class NoCorrectResponseError(RuntimeError):
    """A round found nothing to fine-tune on; the message gives its counts."""


class ExpertIterationTrainer(SFTTrainer):
    """Expert iteration (Anthony et al., 2017; Zelikman et al., 2022, as STaR without hints) on verifiable problems.

    A round draws `questions_per_step` problems and samples `rollouts_per_question` responses to each from the current
    policy. It keeps the correct ones that ended before the limit, each text once, and fine-tunes the policy on them
    for `sft_epochs` with a new optimizer and a complete learning-rate schedule. Round k writes its responses and its
    dataset to `{output_dir}/samples/expert_{k}_rollouts.jsonl` and `expert_{k}_dataset.jsonl`, and `checkpoint-{k}`.
    A run resumed from a checkpoint continues as the original would have, from the beginning of the next round.

    Metrics of a round's responses (`rollouts/*`, entropy in nats per token) are logged before its fine-tuning. Steps
    count the updates of all rounds.

    Args:
        model: as for `SFTTrainer`.
        args: an `ExpertIterationConfig`.
        rows: problems, with `row_id`, `prompt_text`, `answer` and the columns that the grader reads.
        prompts: the model's input for each problem, messages or text.
        grade: such as a `trl_ext.rewards.verified.VerifiedGrader`.
        settings: how responses are sampled.
        validate: called before the first round and after each round's fine-tuning.

    Attributes:
        rounds: number of finished rounds.

    Raises:
        TypeError: `args` is not an `ExpertIterationConfig`.
        ValueError: there are fewer problems than a round draws, or the distributed setup has not been tested.
    """

    _tag_names = ["trl", "trl_ext", "expert-iteration"]
    _name = "Expert iteration"
    _paper: ClassVar[dict] = {"title": "Thinking Fast and Slow with Deep Learning and Tree Search", "id": "1705.08439"}
    # An interrupted round starts again from its responses.
    saves_within_training = False
    # Updates of the rounds before the one that is being fine-tuned.
    _steps_before = 0

    def __init__(
        self,
        model,
        args: ExpertIterationConfig,
        *,
        rows: Sequence[Row],
        prompts: Sequence[Any],
        grade: Grader,
        settings: SamplingSettings,
        validate: Callable[[], None] | None = None,
        **kwargs: Any,
    ):
        args = configuration(self, args, ExpertIterationConfig)
        if len(rows) < args.questions_per_step:
            raise ValueError(f"questions_per_step {args.questions_per_step} is more than the {len(rows)} problems")
        self.rows, self.prompts, self.grade, self.settings = list(rows), list(prompts), grade, settings
        self.validate = validate or (lambda: None)
        self.rounds = 0
        # TRL requires an example before sampling has produced one.
        example = demonstration(self.rows[0], self.prompts[0], str(self.rows[0]["answer"]))
        super().__init__(model, args, train_dataset=Dataset.from_list([example]), **kwargs)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError("expert iteration has not been tested under DeepSpeed or FSDP: use one GPU or DDP")
        if args.use_vllm and (self.accelerator.num_processes > 1 or is_peft_model(self.model)):
            raise ValueError("use_vllm samples in one process from all parameters: leave out adapters and processes")
        self.metrics_file = MetricsFileCallback(Path(args.output_dir) / "metrics.jsonl", of_rounds=True)
        self.add_callback(self.metrics_file)

    def _require_a_batch(self) -> None:
        """The rows of a round are not known before it."""

    def train(self, resume_from_checkpoint: str | bool | None = None) -> None:
        """Run the remaining rounds.

        Args:
            resume_from_checkpoint: folder of a round's checkpoint to continue from, or True for the last complete one.

        Raises:
            NoCorrectResponseError: no response of a round was correct; earlier rounds have their checkpoints.
            FileNotFoundError, ValueError: as for the other trainers, the checkpoint cannot be resumed from.
        """
        self.rounds = self._begin(self._checkpoint_to_resume(resume_from_checkpoint))
        if self.rounds == 0:
            self.validate()
        for step in range(self.rounds + 1, self.args.n_steps + 1):
            self._fine_tune(step, self._keep(step, self._sample(step)))
            self.validate()
            self._save_checkpoint_of(step)
            self.rounds = step

    # ---- Progress of the run ----

    def _begin(self, checkpoint: str | None) -> int:
        """Load a checkpoint, or save the one before the first round; return the number of rounds it has finished."""
        done = 0
        if checkpoint is not None:
            self.check_optimizer_batch(checkpoint)
            saved = json.loads((Path(checkpoint) / ROUND_FILE).read_text(encoding="utf-8"))
            done = saved["expert_step"]
            self.state = TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))
            if done:
                self._load_from_checkpoint(checkpoint)
                checkpoints.set_counts(self, saved["carried_over"])
        self.state.is_world_process_zero = self.is_world_process_zero()
        if self.accelerator.is_main_process:
            # The next round's first line has the step at which the finished ones ended.
            rows, end = read_metrics(self.metrics_file.path) if done else [], self.state.global_step
            self.metrics_file.keep([row for row in rows if row["step"] <= end and row.get("expert_step", 0) <= done])
            for path in (Path(self.args.output_dir) / "samples").glob("expert_*.jsonl"):
                if int(path.name.split("_")[1]) > done:
                    path.unlink()
        self.accelerator.wait_for_everyone()
        if checkpoint is None:
            self._save_checkpoint_of(0)
        return done

    def _save_checkpoint_of(self, step: int) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{step}"
        if self.args.should_save:
            checkpoints.delete(folder)
        self.accelerator.wait_for_everyone()
        if step:
            self.save_model(str(folder))
        if self.args.should_save:
            carried_over = checkpoints.counts_of(self, self.carried_over)
            write_json(folder / ROUND_FILE, {"expert_step": step, "carried_over": carried_over})
            self.state.save_to_json(str(folder / checkpoints.STATE_FILE))
            checkpoints.mark_complete(folder, self.get_total_train_batch_size(self.args))
            checkpoints.delete_old(folder, self.args.save_total_limit)

    # ---- One round ----

    def _sample(self, step: int) -> list[dict[str, Any]]:
        """Graded responses to the questions of a round."""
        args = self.args
        drawn = random.Random(f"{args.seed} {step}").sample(range(len(self.rows)), args.questions_per_step)
        batches = {"batch_size": args.per_device_eval_batch_size, "pad_token_id": self.processing_class.pad_token_id}
        shows_progress = self.accelerator.is_main_process and not args.disable_tqdm
        with trained_policy(self) as policy, self._engine(policy) as engine:
            return evaluate_reasoning(
                [self.rows[index] for index in drawn],
                [self.prompts[index] for index in drawn],
                engine,
                self.grade,
                samples=args.rollouts_per_question,
                # Spaced so that no two rounds, or runs with neighbouring seeds, sample the same.
                seed=args.seed + 7919 * step,
                path=self._file(step, "rollouts"),
                entropies=partial(response_entropies, policy, **batches),
                accelerator=self.accelerator,
                progress=f"round {step}, sampling" if shows_progress else None,
            )

    @contextmanager
    def _engine(self, policy) -> Iterator[Callable]:
        if not self.args.use_vllm:
            yield TransformersEngine(policy, self.processing_class, self.settings)
            return
        share = {"gpu_memory_utilization": self.args.vllm_gpu_memory_utilization}
        with TemporaryDirectory(dir=self.args.output_dir) as folder:
            self.save_model(folder)
            yield VLLMEngine(folder, self.processing_class, self.settings, **share)
        gc.collect()
        torch.cuda.empty_cache()

    def _file(self, step: int, kind: str) -> Path:
        return Path(self.args.output_dir) / "samples" / f"expert_{step}_{kind}.jsonl"

    def _keep(self, step: int, graded: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Log the metrics of a round's responses, and write the correct ones as demonstrations."""
        kept = keep_correct(graded, self.args.max_per_question)
        entropies = [row["entropy"] for row in graded if row.get("entropy") is not None]
        metrics = {
            "expert_step": step,
            "rollouts/reward": fmean(row["answer_reward"] for row in graded),
            "rollouts/format": fmean(row["format_reward"] for row in graded),
            **({"rollouts/entropy": fmean(entropies)} if entropies else {}),
            "rollouts/mean_length": fmean(row["generated_num_tokens"] for row in graded),
            "rollouts/kept": len(kept),
            "rollouts/questions": len({row["row_id"] for row in kept}),
        }
        # TRL's own `log` would add the previous round's training metrics.
        Trainer.log(self, metrics)
        if not kept:
            raise NoCorrectResponseError(
                f"round {step} of expert iteration: none of {len(graded)} responses to "
                f"{self.args.questions_per_step} questions was correct and ended ({dict(count_categories(graded))})"
            )
        prompts = {row["row_id"]: prompt for row, prompt in zip(self.rows, self.prompts, strict=True)}
        demonstrations = [demonstration(row, prompts[row["row_id"]], row["response_text"]) for row in kept]
        if self.accelerator.is_main_process:
            write_json_lines(self._file(step, "dataset"), demonstrations)
        return demonstrations

    def _fine_tune(self, step: int, demonstrations: list[dict[str, Any]]) -> None:
        # As at the start of a Trainer: only the weights carry over from the previous round.
        self.optimizer = self.lr_scheduler = None
        self.model_wrapped = self.model
        set_seed(self.args.seed + step)
        self.train_dataset = self._prepare_dataset(
            Dataset.from_list(demonstrations), self.processing_class, self.args, self.args.packing, None, "train"
        )
        # Each call of `train` creates a new state.
        before, self._steps_before = self.state, self.state.global_step
        super().train()
        self.state.global_step += self._steps_before
        self.state.log_history = [*before.log_history, *self.state.log_history]
        self._steps_before = 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log with the number of updates over all rounds as the step."""
        self.state.global_step += self._steps_before
        super().log(logs, start_time)
        self.state.global_step -= self._steps_before


def keep_correct(graded: Sequence[Row], max_per_question: int | None = None) -> list[Row]:
    """The correct rows of `evaluate_reasoning`, each text once per question, up to `max_per_question` of a question.

    A truncated response has no end to train on, and is left out even if its answer is correct.
    """
    texts: dict[str, set[str]] = {}
    kept = []
    for row in graded:
        seen = texts.setdefault(row["row_id"], set())
        full = max_per_question is not None and len(seen) >= max_per_question
        if row["category"] == "correct" and row["finished"] and row["response_text"] not in seen and not full:
            seen.add(row["response_text"])
            kept.append(row)
    return kept


def demonstration(row: Row, prompt: Any, response: str) -> dict[str, Any]:
    """A row to fine-tune on, with messages on both sides or text on both."""
    completion = response if isinstance(prompt, str) else [{"role": "assistant", "content": response}]
    return {"row_id": row["row_id"], "prompt": prompt, "completion": completion}
