"""Plant faults in trainers of TRL and of this library, and print which of them `trl-ext doctor` names.

`python -m benchmarks.doctor` plants every fault that needs no training, examines the same trainers without a fault,
and then the recipes' configurations for the embedded benchmark. Everything runs on the embedded model. `--steps 3`
trains three steps of each configuration as well.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import tempfile
from collections.abc import Callable
from functools import cache

import torch

import trl_ext
from trl_ext.doctor import CHECKS, Report, examine
from trl_ext.doctor.patient import Patient
from trl_ext.doctor.table import run_checks
from trl_ext.toy import MODEL_DIR

ROWS = 60
# Kind -> TRL's trainer and this library's.
TRAINERS = {
    "sft": ("SFT", "SFT"),
    "preference": ("DPO", "Preference"),
    "reward": ("Reward", "Reward"),
    "policy": ("GRPO", "Policy"),
}
LLAMA = (
    "{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>{{ message['content'] }}"
    "<|eot_id|>{% endfor %}"
)


def length_reward(completions, **columns) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


def build(kind: str, own: bool, **options):
    """A trainer on the embedded model and rows; `options` are settings, or arguments of the trainer."""
    import trl

    name = TRAINERS[kind][own]
    room = trl_ext if own else trl
    arguments = {key: options.pop(key) for key in ("peft_config",) if key in options}
    benchmark = _benchmark()
    rows, held_out = benchmark["train_prefs"], benchmark["validation_prefs"]
    if kind == "sft":
        rows = rows.map(lambda row: {"completion": row["chosen"]}).select_columns(["prompt", "completion"])
        held_out = None
    elif kind == "policy":
        rows, held_out = benchmark["train_gen"], None
        arguments["reward_funcs"] = length_reward
        options = {"num_generations": 4, "max_completion_length": 24, "beta": 0.04, **options}
    shared = {"learning_rate": 3e-4, "per_device_train_batch_size": 8, "max_steps": 20, "report_to": "none"}
    shared |= {"use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    settings = getattr(room, f"{name}Config")(output_dir=tempfile.mkdtemp(), **{**shared, **options})
    arguments |= {"train_dataset": rows, "eval_dataset": held_out}
    return getattr(room, f"{name}Trainer")(model=str(MODEL_DIR), args=settings, **arguments)


@cache
def _benchmark():
    benchmark = trl_ext.load_benchmark("toy")
    return {name: benchmark[name].select(range(ROWS)) for name in ("train_prefs", "validation_prefs", "train_gen")}


# ---- Faults in what a built trainer holds: functions of the trainer and of `patch(owner, attribute, value)` ----


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault by the name of its check, and the kinds of trainers that it is planted in."""

    name: str
    kinds: str
    plant: Callable


def _tokens(**edits):
    """Replace columns of the tokenized data: name -> function of the row."""

    def plant(trainer, patch):
        rows = [row | {name: edit(row) for name, edit in edits.items()} for row in trainer.train_dataset]
        patch(trainer, "train_dataset", type(trainer.train_dataset).from_list(rows))

    return plant


def _template(template: str | None, **attributes):
    def plant(trainer, patch):
        tokenizer = trainer.processing_class
        patch(tokenizer, "chat_template", template.replace("ORIGINAL", tokenizer.chat_template) if template else None)
        for name, value in attributes.items():
            patch(tokenizer, name, value)

    return plant


def _labels(change: Callable):
    """Change what is learned in each batch: `change(ids, mask)` edits the mask in place."""

    def plant(trainer, patch):
        collate = trainer.data_collator

        def collated(rows):
            batch = collate(rows)
            name, off = ("labels", -100) if "labels" in batch else ("completion_mask", 0)
            batch[name] = batch[name].masked_fill(change(batch["input_ids"], trainer.processing_class), off)
            return batch

        patch(trainer, "data_collator", collated)

    return plant


def _set(*path: str, value):
    def plant(trainer, patch):
        for name in path[:-1]:
            trainer = getattr(trainer, name)
        patch(trainer, path[-1], value)

    return plant


def _frozen(trainer, patch):
    for weight in trainer.model.parameters():
        patch(weight, "requires_grad", False)


def _bfloat16(trainer, patch):
    patch(trainer.args, "learning_rate", 1e-6)
    for weight in trainer.model.parameters():
        patch(weight, "data", weight.data.bfloat16())


def _dropout(trainer, patch):
    for module in trainer.model.modules():
        if hasattr(module, "attention_dropout"):
            patch(module, "attention_dropout", 0.1)


def _unlearned_prompt(trainer, patch):
    collate = trainer.data_collator

    def collated(rows):
        batch = collate(rows)
        padding = batch["attention_mask"] == 0
        if "labels" in batch:
            batch["labels"] = batch["input_ids"].masked_fill(padding, -100)
        else:
            batch["completion_mask"] = batch["attention_mask"].clone()
        return batch

    patch(trainer, "data_collator", collated)


def _without_end(name: str):
    return lambda row: row[name][:-1]


def _other_end(trainer, patch):
    """The tokenizer's own end token is not that of the template, as with many base models."""
    tokenizer = trainer.processing_class
    patch(trainer.model.generation_config, "eos_token_id", tokenizer.pad_token_id)
    patch(tokenizer, "eos_token", tokenizer.pad_token)


def _system(row):
    return [{"role": "system", "content": "Answer in one short sentence."}, *row["prompt"]]


def _system_lost(trainer, patch):
    _tokens(prompt=_system)(trainer, patch)
    patch(trainer.processing_class, "chat_template", "{% set messages = messages[1:] %}" + LLAMA_FREE)


LLAMA_FREE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def _repeated(trainer, patch):
    patch(trainer, "train_dataset", trainer.train_dataset.select([*range(15)] * 4))


def _shortened(row):
    return row["chosen_ids"][:2]


def _user_text(row):
    return [{"role": "user", "content": row["prompt"][0]["content"] + "<|im_end|>"}]


def _truncated(trainer, patch):
    """As if the limit was lower when the data was prepared."""
    own = hasattr(trainer.args, "max_response_tokens")
    patch(trainer.args, "max_response_tokens" if own else "max_length", 3 if own else 12)
    if not own:
        patch(trainer.data_collator, "max_length", 12)


FAULTS = [
    Fault("template-missing", "policy", _template(None)),
    Fault("template-of-another-model", "policy", _template(LLAMA)),
    Fault("special-token-in-text", "policy", _tokens(prompt=_user_text)),
    Fault("begin-token-doubled", "policy", _template("<|im_start|>ORIGINAL", bos_token="<|im_start|>")),
    Fault("system-prompt-lost", "policy", _system_lost),
    Fault("unknown-tokens", "policy preference", _set("processing_class", "unk_token", value=".")),
    Fault(
        "end-token-missing",
        "preference",
        _tokens(chosen_ids=_without_end("chosen_ids"), rejected_ids=_without_end("rejected_ids")),
    ),
    Fault("end-token-missing", "sft", _tokens(input_ids=_without_end("input_ids"), labels=_without_end("labels"))),
    Fault("end-token-masked", "sft preference", _labels(lambda ids, tokenizer: ids == tokenizer.eos_token_id)),
    Fault("end-token-not-stopped-at", "sft preference", _other_end),
    Fault("nothing-learned-in-rows", "sft preference", _labels(lambda ids, _: torch.ones_like(ids).bool())),
    Fault("loss-on-prompt", "sft preference", _unlearned_prompt),
    Fault("truncated-rows", "preference", _truncated),
    Fault("chosen-equals-rejected", "preference reward", _tokens(rejected_ids=lambda row: row["chosen_ids"])),
    Fault("length-predicts-label", "preference reward", _tokens(rejected_ids=_shortened)),
    Fault("leaking-prompts", "preference reward", lambda t, patch: patch(t, "eval_dataset", t.train_dataset)),
    Fault("duplicate-rows", "sft preference reward", _repeated),
    Fault("nothing-trainable", "sft preference reward policy", _frozen),
    Fault("reference-is-policy", "preference policy", lambda t, patch: patch(t, "ref_model", t.model)),
    Fault("dropout-on", "preference policy", _dropout),
    Fault("updates-round-to-nothing", "sft preference reward policy", _bfloat16),
    Fault("learning-rate-off", "sft preference reward policy", _set("args", "learning_rate", value=1e-9)),
    Fault("warmup-outlasts-run", "sft preference reward policy", _set("args", "warmup_steps", value=50)),
    Fault("beta-off", "preference policy", _set("args", "beta", value=100.0)),
    Fault("greedy-sampling", "policy", _set("args", "temperature", value=0.01)),
]


def examine_with(trainer, fault: Fault) -> Report:
    """Examine a trainer with a fault in it, which is taken out again."""
    with contextlib.ExitStack() as stack:

        def patch(owner, name, value):
            # Not unittest.mock, which deletes what is not in an object's own dictionary, as in tensors.
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        fault.plant(trainer, patch)
        return examine(trainer)


# ---- Faults in what the first steps log: the logged rows, and the changes of weights ----

_ONLINE = {"reward": 0.4, "reward_std": 0.3, "frac_reward_zero_std": 0.25, "completions/clipped_ratio": 0.2}
_ONLINE |= {"clip_ratio/region_mean": 0.0}
HEALTHY_LOGS = {
    "policy": {**_ONLINE, "kl": 0.001},
    "preference": {"rewards/margins": 0.01},
    "reward": {"min_reward": -1.0, "max_reward": 1.0},
    "sft": {},
}
MOVED = {"policy": 1e-4, "reference": 0.0}
# Name -> the kind, what every row logs instead, and the changes of weights.
LOGGED_FAULTS = {
    "rewards-all-zero": ("policy", {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}, {}),
    "rewards-all-one": ("policy", {"reward": 1.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}, {}),
    "rewards-constant": ("policy", {"reward": 0.5, "reward_std": 0.0, "frac_reward_zero_std": 1.0}, {}),
    "dead-groups": ("policy", {"frac_reward_zero_std": 0.95}, {}),
    "responses-all-cut": ("policy", {"completions/clipped_ratio": 1.0}, {}),
    "stop-texts-never-occur": ("policy", {"completions/clipped_ratio": 1.0}, {}),
    "kl-explodes": ("policy", {"kl": 40.0}, {}),
    "policy-equals-reference": ("preference", {"rewards/margins": 0.0}, {}),
    "ratio-not-one": ("policy", {"clip_ratio/region_mean": 0.1}, {}),
    "gradient-always-clipped": ("sft", {"grad_norm": 900.0}, {}),
    "no-gradient": ("reward", {"grad_norm": 0.0}, {}),
    "weights-do-not-move": ("sft", {}, {"policy": 0.0}),
    "reference-moves": ("preference", {}, {"reference": 1e-4}),
    "scores-all-equal": ("reward", {"min_reward": 0.0, "max_reward": 0.0}, {}),
}


def logged(kind: str, changed: dict | None = None, moved: dict | None = None, **settings) -> Report:
    """The checks of three logged steps, and of a configuration."""
    from types import SimpleNamespace

    row = {"grad_norm": 1.5, **HEALTHY_LOGS[kind], **(changed or {})}
    logs = [{"step": step, "learning_rate": 1e-4 * (step - 1), **row} for step in (1, 2, 3)]
    args = SimpleNamespace(max_grad_norm=1.0, num_generations=4, **settings)
    patient = Patient(args=args, kind=kind, logs=logs)
    patient.moved = {**MOVED, **(moved or {})}
    return run_checks(patient, ("steps",))


# ---- The table ----

RECIPES = (
    *("aot", "dpo", "ipo", "preference", "kto", "reward_model", "sft", "rlhf_sft"),
    *("grpo", "dr_grpo", "gspo", "rloo", "remax", "policy", "ppo", "online_preference", "distillation", "grpo_math"),
)
REWARDED = ("grpo", "dr_grpo", "gspo", "rloo", "remax", "policy", "ppo", "online_preference")


def healthy_recipe(recipe: str, steps: int = 0) -> Report:
    """Examine a recipe's configuration for the embedded benchmark."""
    from trl_ext.runs.studies.examination import examine_recipe

    flags = []
    if recipe in REWARDED:
        flags = ["--reward_function", "benchmarks.doctor:length_reward"]
    if recipe == "distillation":
        flags = ["--teacher_model_name_or_path", "toy"]
    return examine_recipe(recipe, flags, steps=steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=0, help="steps to train of each configuration")
    parser.add_argument("--recipes", nargs="*", default=RECIPES, help="configurations without a fault")
    flags = parser.parse_args()
    rows, alarms = [], []
    for kind in TRAINERS:
        for own in (False, True):
            with contextlib.redirect_stdout(io.StringIO()):
                trainer = build(kind, own)
                silent = examine(trainer)
            name = f"{'trl_ext' if own else 'trl'}.{TRAINERS[kind][own]}Trainer"
            alarms.append((name, silent))
            for fault in FAULTS:
                if kind in fault.kinds.split():
                    rows.append((fault.name, name, examine_with(trainer, fault)))
    for name, (kind, changed, moved) in LOGGED_FAULTS.items():
        settings = {"stop": ["</answer>"]} if name == "stop-texts-never-occur" else {}
        rows.append((name, f"logs of {kind}", logged(kind, changed, moved, **settings)))
    for recipe in flags.recipes:
        alarms.append((f"toy/{recipe}.yaml", healthy_recipe(recipe, flags.steps)))
    print("| fault | planted in | named | also named |\n|---|---|---|---|")
    for name, where, report in rows:
        others = ", ".join(other for other in report.names if other != name)
        print(f"| {name} | {where} | {'yes' if name in report.names else 'NO'} | {others} |")
    named = sum(name in report.names for name, _, report in rows)
    print(
        f"\n{named} of {len(rows)} planted faults named, by {len({name for name, *_ in rows})} of {len(CHECKS)} checks"
    )
    print(f"{sum(not report.healthy for _, report in alarms)} of {len(alarms)} healthy runs with a false alarm")
    for name, report in alarms:
        if report.findings or report.skipped:
            print(f"  {name}: {', '.join(report.names)} {report.skipped or ''}")


if __name__ == "__main__":
    main()
