"""`ExpertIterationTrainer`: sample, keep the responses that verify, fine-tune on them by `SFTTrainer`, repeat."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import is_peft_model, set_seed
from datasets import Dataset
from transformers import Trainer, TrainerState

from trl_ext.evaluation.reasoning import Grader, evaluate_reasoning, summarize_reasoning
from trl_ext.evaluation.reasoning.grading import name_of
from trl_ext.files import write_json, write_json_lines
from trl_ext.rollouts import SamplingSettings, TransformersEngine, VLLMEngine, response_entropies
from trl_ext.trainers import checkpoints
from trl_ext.trainers.callbacks import MetricsFileCallback, read_metrics
from trl_ext.trainers.checkpoints import ROUND_FILE
from trl_ext.trainers.expert_iteration_config import ExpertIterationConfig
from trl_ext.trainers.policies import trained_policy
from trl_ext.trainers.sft import SFTTrainer

Row = Mapping[str, Any]


class NoCorrectResponseError(RuntimeError):
    """A round found nothing to fine-tune on; the message gives its counts."""


class ExpertIterationTrainer(SFTTrainer):
    """Expert iteration (Anthony et al., 2017; Zelikman et al., 2022, as STaR without hints) on problems that verify.

    A round draws `questions_per_step` problems, samples `rollouts_per_question` responses to each from the policy as
    it is, keeps the correct ones that ended before the limit, each text once, and fine-tunes the policy on them for
    `sft_epochs` with a new optimizer and the whole learning-rate schedule. Files of round k: its responses and its
    dataset, `{output_dir}/samples/expert_{k}_rollouts.jsonl` and `expert_{k}_dataset.jsonl`, and `checkpoint-{k}`. A
    run that is resumed from a checkpoint goes on as it would have, also from the middle of the sampling; responses to
    other problems or prompts, or under other settings or another reward, are not taken up.

    Logged before a round's fine-tuning: `expert_step`, and of its responses `rollouts/reward`, `rollouts/format`,
    `rollouts/entropy` (nats per token), `rollouts/mean_length`, `rollouts/kept`, `rollouts/questions` (with a kept
    response) and `rollouts/correct_but_cut` (correct, cut at the limit, and so not kept). Steps count the updates of
    all rounds.

    Args:
        model: as for `SFTTrainer`.
        args: an `ExpertIterationConfig`.
        rows: problems, with `row_id`, `prompt_text`, `answer` and what the grader reads.
        prompts: what the model is given for each, messages or text.
        grade: as `trl_ext.evaluation.reasoning.grader` makes it.
        settings: how responses are sampled.
        validate: called before the first round and after each one's fine-tuning.

    Attributes:
        stops: called after each round but the last; the run ends there where it is true. None to run all rounds.
        rounds: how many are finished.

    Raises:
        TypeError: `args` is not an `ExpertIterationConfig`.
        ValueError: fewer problems than a round draws, or a way of distribution that has not been tried.
    """

    _tag_names = ["trl", "trl_ext", "expert-iteration"]
    _name = "Expert iteration"
    _paper: ClassVar[dict] = {"title": "Thinking Fast and Slow with Deep Learning and Tree Search", "id": "1705.08439"}
    # A round begins again from its responses.
    saves_within_training = False

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
        if not isinstance(args, ExpertIterationConfig):
            raise TypeError(f"ExpertIterationTrainer takes an ExpertIterationConfig, got {type(args).__name__}")
        if len(rows) < args.questions_per_step:
            raise ValueError(
                f"questions_per_step {args.questions_per_step} is more than the {len(rows)} problems to train on: "
                "lower it"
            )
        self.rows, self.prompts, self.grade, self.settings = list(rows), list(prompts), grade, settings
        self.validate = validate
        self.stops: Callable[[], bool] | None = None
        self.rounds = 0
        # Updates of the rounds before the one whose fine-tuning is going on.
        self._steps_before = 0
        # TRL must see an example before there is one.
        example = _demonstration(self.rows[0], self.prompts[0], str(self.rows[0]["answer"]))
        super().__init__(model, args, train_dataset=Dataset.from_list([example]), **kwargs)
        self._check_distribution()
        self.metrics_file = _MetricsOfAllRounds(Path(args.output_dir) / "metrics.jsonl")
        self.add_callback(self.metrics_file)

    def _check_distribution(self) -> None:
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError("expert iteration has not been tried under DeepSpeed or FSDP: use one GPU or DDP")
        if self.args.use_vllm and (self.accelerator.num_processes > 1 or is_peft_model(self.model)):
            raise ValueError("use_vllm samples in one process from all parameters: leave out adapters and processes")

    def train(self, resume_from_checkpoint: str | None = None) -> None:
        """Run the rounds that are left.

        Args:
            resume_from_checkpoint: folder of a round's checkpoint to go on from.

        Raises:
            NoCorrectResponseError: no response of a round was correct; earlier rounds have their checkpoints.
        """
        self.rounds = self._begin(resume_from_checkpoint)
        if self.rounds == 0:
            self._validate()
        for step in range(self.rounds + 1, self.args.n_steps + 1):
            demonstrations = self._collect(step)
            self._fine_tune(step, demonstrations)
            self._validate()
            self._save_checkpoint_of(step)
            self.rounds = step
            if step < self.args.n_steps and self.stops is not None and self.stops():
                break

    def _validate(self) -> None:
        if self.validate is not None:
            self.validate()

    # ---- Where the run stands ----

    def _begin(self, checkpoint: str | None) -> int:
        """Take up a checkpoint, or make the one that stands before the first round; returns the rounds it has seen."""
        main = self.accelerator.is_main_process
        done, same_sampling = 0, False
        if checkpoint is not None:
            checkpoints.check_checkpoint(checkpoint)
            self._resumed_from = Path(checkpoint)
            if not (Path(checkpoint) / ROUND_FILE).is_file():
                raise ValueError(f"the checkpoint {checkpoint} is not that of a round: it has no {ROUND_FILE}")
            saved = json.loads((Path(checkpoint) / ROUND_FILE).read_text(encoding="utf-8"))
            done, same_sampling = saved["expert_step"], saved["sampling"] == self._sampling()
            self.state = TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))
            if done:
                self._load_from_checkpoint(checkpoint)
                self._set_counts(saved.get("carried_over", {}))
        self.state.is_world_process_zero = self.is_world_process_zero()
        if main:
            self.metrics_file.keep_rounds(done, self.state.global_step)
            # What later rounds left was sampled from policies that this run may not come by.
            for path in (Path(self.args.output_dir) / "samples").glob("expert_*.jsonl"):
                step = int(path.name.split("_")[1])
                if step > done + same_sampling:
                    path.unlink()
        self.accelerator.wait_for_everyone()
        if checkpoint is None:
            self._save_checkpoint_of(0)
        return done

    def _save_checkpoint_of(self, step: int) -> None:
        final = Path(self.args.output_dir) / f"checkpoint-{step}"
        partial = final.parent / checkpoints.PARTIAL_FOLDER / final.name
        with self._written_whole(partial, final):
            if step:
                self.save_model(str(partial))
            if self.args.should_save:
                told = {"expert_step": step, "sampling": self._sampling(), "carried_over": self._counts()}
                write_json(partial / ROUND_FILE, told)
                self.state.save_to_json(str(partial / checkpoints.STATE_FILE))
        if self.args.should_save:
            in_use = self._resumed_from if step < self.args.n_steps else None
            checkpoints.delete_old(final, self.args.save_total_limit, in_use=in_use)

    def _sampling(self) -> dict[str, Any]:
        """What decides which responses a policy gives and how they are graded, ready for JSON."""
        args = self.args
        own = [args.seed, args.questions_per_step, args.rollouts_per_question, args.use_vllm, len(self.rows)]
        problems = json.dumps([self.rows, self.prompts], sort_keys=True, default=str).encode()
        return {
            **dataclasses.asdict(self.settings),
            "stop": list(self.settings.stop),
            "own": own,
            "reward": name_of(self.grade),
            "problems": hashlib.sha256(problems).hexdigest(),
        }

    # ---- One round ----

    def _collect(self, step: int) -> list[dict[str, Any]]:
        """Sample and grade, log, and write what is kept."""
        graded, prompts = self._sample(step)
        kept = keep_correct(graded, self.args.max_per_question)
        summary = summarize_reasoning(graded)
        cut = sum(row["category"] == "correct" and not row["finished"] for row in graded)
        figures = {
            "expert_step": step,
            "rollouts/reward": summary["accuracy"]["mean"],
            "rollouts/format": summary["format_rate"]["mean"],
            "rollouts/entropy": summary["mean_entropy"],
            "rollouts/mean_length": summary["mean_tokens"],
            "rollouts/kept": len(kept),
            "rollouts/questions": len({row["row_id"] for row in kept}),
            "rollouts/correct_but_cut": cut,
        }
        # TRL's own `log` would add the training metrics of the round before.
        Trainer.log(self, {name: value for name, value in figures.items() if value is not None})
        if not kept:
            counts = summary["categories"]
            ended = f" and ended ({cut} were correct and cut at {self.settings.max_new_tokens} tokens)" if cut else ""
            raise NoCorrectResponseError(
                f"round {step} of expert iteration: none of {len(graded)} responses to {summary['n_prompts']} "
                f"questions was correct{ended} ({counts['wrong_answer']} in the form asked for with a wrong answer, "
                f"{counts['wrong_format']} in another form), so there is nothing to fine-tune on: raise "
                "questions_per_step or rollouts_per_question, begin from a better model, or check the prompt and the "
                "reward"
            )
        demonstrations = [_demonstration(row, prompts[row["row_id"]], row["response_text"]) for row in kept]
        if self.accelerator.is_main_process:
            write_json_lines(self._file(step, "dataset"), demonstrations)
        return demonstrations

    def _sample(self, step: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Graded responses to the questions of a round, and the prompts by row_id."""
        drawn = random.Random(f"{self.args.seed} {step}").sample(range(len(self.rows)), self.args.questions_per_step)
        rows, prompts = ([values[index] for index in drawn] for values in (self.rows, self.prompts))
        progress = f"round {step}, sampling" if self.accelerator.is_main_process else None
        with trained_policy(self) as policy, self._engine(policy) as engine:
            graded = evaluate_reasoning(
                rows,
                prompts,
                engine,
                self.grade,
                samples=self.args.rollouts_per_question,
                # Far enough apart that no two rounds, or runs of neighbouring seeds, draw alike.
                seed=self.args.seed + 7919 * step,
                path=self._file(step, "rollouts"),
                entropies=lambda generations: response_entropies(
                    policy,
                    generations,
                    batch_size=self.args.per_device_eval_batch_size,
                    pad_token_id=self.processing_class.pad_token_id,
                ),
                accelerator=self.accelerator,
                progress=None if self.args.disable_tqdm else progress,
            )
        return graded, {row["row_id"]: prompt for row, prompt in zip(rows, prompts, strict=True)}

    @contextmanager
    def _engine(self, policy) -> Iterator[Callable]:
        tokenizer = self.processing_class
        if not self.args.use_vllm:
            yield TransformersEngine(policy, tokenizer, self.settings)
            return
        folder = Path(self.args.output_dir) / "samples" / "policy"
        self.save_model(str(folder))
        share = self.args.vllm_gpu_memory_utilization
        engine = VLLMEngine(str(folder), tokenizer, self.settings, gpu_memory_utilization=share)
        try:
            yield engine
        finally:
            del engine
            gc.collect()
            torch.cuda.empty_cache()
            shutil.rmtree(folder, ignore_errors=True)

    def _file(self, step: int, kind: str) -> Path:
        return Path(self.args.output_dir) / "samples" / f"expert_{step}_{kind}.jsonl"

    def _fine_tune(self, step: int, demonstrations: list[dict[str, Any]]) -> None:
        # As Trainer begins: nothing of the round before but the weights.
        self.optimizer = self.lr_scheduler = None
        self.model_wrapped = self.model
        set_seed(self.args.seed + step)
        self.train_dataset = self._prepare_dataset(
            Dataset.from_list(demonstrations), self.processing_class, self.args, self.args.packing, None, "train"
        )
        self._steps_before, logged = self.state.global_step, self.state.log_history
        try:
            super().train()
        finally:
            self.state.global_step += self._steps_before
            # Each training begins a state of its own.
            self.state.log_history = [*logged, *self.state.log_history]
            self._steps_before = 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's, at the number of updates over all rounds."""
        self.state.global_step += self._steps_before
        try:
            super().log(logs, start_time)
        finally:
            self.state.global_step -= self._steps_before


class _MetricsOfAllRounds(MetricsFileCallback):
    """One file for the trainings of all rounds, each of which begins like a run."""

    def on_train_begin(self, args, state, control, **kwargs):
        pass

    def keep_rounds(self, rounds: int, step: int) -> None:
        """Begin behind the lines of so many rounds, which ended at a step; the next one's first has it too."""
        self.keep_until(step)
        write_json_lines(self.path, [row for row in read_metrics(self.path) if row.get("expert_step", 0) <= rounds])


def keep_correct(graded: Sequence[Row], max_per_question: int | None = None) -> list[Row]:
    """The correct responses in their order, each text once for a question, and the first so many of a question.

    One that the limit cut has no end to be trained on, and is left out, whatever answer it had reached.

    Args:
        graded: rows of `evaluate_reasoning`.
        max_per_question: None for no limit.
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


def _demonstration(row: Row, prompt: Any, response: str) -> dict[str, Any]:
    """A row to fine-tune on, messages on both sides or text on both."""
    completion = response if isinstance(prompt, str) else [{"role": "assistant", "content": response}]
    return {"row_id": row["row_id"], "prompt": prompt, "completion": completion}
