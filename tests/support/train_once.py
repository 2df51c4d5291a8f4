"""Build the trainer of a specification on a tiny model and train it, in this process or in several.

Tests call `build` or `train` in their own process. `train_under` runs this file under torchrun or accelerate, several
specifications to one launch: `train_once.py SPECS.json FOLDER`.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import zlib
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.support import REPOSITORY
from tests.support.float64 import precision

# Plain SGD without clipping: the change of the parameters is minus the gradient.
ONE_STEP = {"max_steps": 1, "learning_rate": 1.0, "optim": "sgd", "lr_scheduler_type": "constant"}
ONE_STEP |= {"max_grad_norm": 0.0, "logging_steps": 1, "report_to": "none", "save_strategy": "no"}
ONE_STEP |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "seed": 0}
# The order of the rows, so that how they are split is the only difference.
DEFAULTS = {**ONE_STEP, "per_device_train_batch_size": 2, "train_sampling_strategy": "sequential"}
# A reference that is not the policy.
REFERENCE = {"reference_seed": 1, "reference_scale": 0.1}
ON_THE_CPU = {"use_cpu": True, "mixed_precision": "no"}
# An engine that accelerate has for accelerators alone; `shard_on_the_cpu` does the rest.
FSDP2_ON_THE_CPU = "fsdp2 on the CPU"
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
FSDP2 |= {"FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
FSDP2 |= {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT", "ACCELERATE_USE_CPU": "true"}


def named_methods(module) -> list[str]:
    """The names in a module of named pairs, such as `DPO` of `DPOConfig` and `DPOTrainer`."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return [name.removesuffix("Trainer") for name in own if name.endswith("Trainer")]


@dataclass
class Run:
    """What a run leaves.

    Attributes:
        parameters: the trained parameters by name.
        logs: an entry for each step, times left out.
        start: the parameters before training; like what follows, of runs in other processes.
        evaluation: held-out figures at the end, where the specification has `held_out`.
        scores: of the training pairs, chosen then rejected, by a reward model that is saved.
        facts: `processes`; `engine`, as it was foreseen; `in_force`, accelerate's name for it; `zero_stage`; `shards`,
            the number of parameters that are divided; `groups`, those of the latest rollout on each process; and of a
            packed trainer `packed_tokens`, `padded_tokens`, `left_padded` and `reference`, whether the reference model
            is packed.
        folder: of its output.
    """

    parameters: dict
    logs: list[dict]
    start: dict = field(default_factory=dict)
    evaluation: dict = field(default_factory=dict)
    scores: Any = None
    facts: dict = field(default_factory=dict)
    folder: Path | None = None

    @property
    def losses(self) -> list[float]:
        return [entry["loss"] for entry in self.logs]

    @property
    def change(self):
        """What training changed, over all parameters, [P], float64."""
        import torch

        names = sorted(self.start)
        return torch.cat([(self.parameters[name].double() - self.start[name].double()).flatten() for name in names])

    def gradient(self, model_path: str):
        """Gradient of one step of SGD at learning rate 1 on all parameters of the model at `model_path`, [P]."""
        import torch
        from safetensors.torch import load_file

        initial = load_file(Path(model_path) / "model.safetensors")
        return torch.cat([(initial[name] - self.parameters[name]).flatten() for name in sorted(initial)]).double()


def relative_difference(tensor, expected) -> float:
    """Norm of the difference over the norm of what is expected."""
    return ((tensor - expected).norm() / expected.norm()).item()


def largest_difference(parameters: dict, expected: dict) -> float:
    """Largest absolute difference of two sets of parameters, which must have the same names."""
    assert parameters.keys() == expected.keys()
    return max((parameters[name] - expected[name]).abs().max().item() for name in expected)


# ---- Building ----


def classes(name: str) -> tuple[type, type]:
    """A trainer's class and its configuration's, by its name in trl_ext, or in TRL as "trl.NAME"."""
    import trl

    import trl_ext

    library = trl if name.startswith("trl.") else trl_ext
    name = name.removeprefix("trl.")
    return getattr(library, name), getattr(library, name.replace("Trainer", "Config"))


def demonstrations(rows: list[dict]) -> list[dict]:
    """The prompts of pairs with their chosen responses."""
    return [{"row_id": row["row_id"], "prompt": row["prompt"], "completion": row["chosen"]} for row in rows]


def build(spec: dict, output_dir: str, **trainer_arguments: Any):
    """The trainer of a specification, not yet trained. All keys are optional but `model`.

    Of every trainer: `trainer` (a name of `classes`), `model` (path, or a model), `dtype` (of the weights, float64
    unless given; None hands the model over as it is), `args` for the configuration, `rows` (rows, or indices of the
    usual ones), `held_out` (rows to evaluate on), `lora` (True for a new adapter, "given" for a model that comes with
    one, its own reference), `lora_dropout`, `shift` (see `shift`), and `fault` (a class of `faults_once`).

    Of pairs: how many `pairs`, `data_seed`, `reference_seed` (perturb the reference by this seed; None for TRL's own)
    and `reference_scale` (how far). Of a policy: how many `prompts`, `rewards` (names of `rollout_once.REWARDS`, or
    folders), `fixed` (`rollout_once.FixedRollouts`), `uneven` (most of its responses are short), and `perturb` (move
    the policy off its reference by this seed).
    """
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    from tests.support import faults_once, rollout_once
    from tests.support.tiny import pairs, perturbed

    # More threads than one only slow so small a model down.
    torch.set_num_threads(1)
    name = spec.get("trainer", "PreferenceTrainer")
    trainer_class, config_class = classes(name)
    is_policy = issubclass(trainer_class, (trl.GRPOTrainer, trl.RLOOTrainer))
    trainer_class = trainer_arguments.pop("trainer_class", trainer_class)
    mixins = [rollout_once.FixedRollouts] if spec.get("fixed") else []
    mixins += [getattr(faults_once, spec["fault"])] if "fault" in spec else []
    if mixins:
        trainer_class = type(trainer_class.__name__, (*mixins, trainer_class), {"spec": spec})
    defaults = rollout_once.DEFAULTS if is_policy else DEFAULTS
    if name.startswith("trl.") and not is_policy:
        defaults = {**defaults, "max_length": None}
    args = config_class(**{**defaults, **spec.get("args", {}), "output_dir": output_dir})

    pool = rollout_once.prompts(spec.get("prompts", 8)) if is_policy else []
    pool = pool or pairs(spec.get("pairs", 8), seed=spec.get("data_seed", 0))
    rows = [pool[row] if isinstance(row, int) else row for row in spec.get("rows", pool)]
    sets = {"train_dataset": rows, **({"eval_dataset": spec["held_out"]} if "held_out" in spec else {})}
    prepare = demonstrations if name == "SFTTrainer" else list
    arguments = {role: Dataset.from_list(prepare(given)) for role, given in sets.items()}
    if spec.get("lora"):
        options = {"r": 4, "lora_alpha": 8, "lora_dropout": spec.get("lora_dropout", 0.0)}
        options |= {"target_modules": ["q_proj", "v_proj", "up_proj"], "task_type": "CAUSAL_LM" if is_policy else None}
        # B is zero otherwise, and the first gradients of A with it.
        arguments["peft_config"] = LoraConfig(**options, init_lora_weights=False)
    model, reference, moved = spec["model"], None, []
    # Drawn anew are adapters, and the heads of reward models.
    torch.manual_seed(0)
    if spec.get("dtype", "float64") is not None:
        kind, options = AutoModelForCausalLM, {"dtype": getattr(torch, spec.get("dtype", "float64"))}
        if name.endswith("RewardTrainer"):
            kind, options = AutoModelForSequenceClassification, {**options, "num_labels": 1}
        arguments["processing_class"] = AutoTokenizer.from_pretrained(model)
        model = kind.from_pretrained(spec["model"], **options)
        if spec.get("lora") == "given":
            model = get_peft_model(model, arguments.pop("peft_config"))
        if spec.get("reference_seed") is not None:
            reference = kind.from_pretrained(spec["model"], **options)
            perturbed(reference, seed=spec["reference_seed"], scale=spec.get("reference_scale", 0.05))
    if "perturb" in spec:
        policy = list(model.parameters())
        moved = perturbed(copy.deepcopy(model), seed=spec["perturb"], scale=0.02).parameters()
    second = [] if reference is None else [reference]
    if is_policy:
        rewards = [rollout_once.REWARDS.get(reward, reward) for reward in spec.get("rewards", ["thirds"])]
        second = [trainer_arguments.pop("reward_funcs", rewards)]
    trainer = trainer_class(model, *second, args=args, **{**arguments, **trainer_arguments})
    # Only now: the reference of a model in memory is a copy of it.
    for parameter, value in zip(policy if moved else [], moved, strict=True):
        parameter.data.copy_(value)
    if spec.get("shift"):
        shift(trainer.model)
    return trainer


def shift(model) -> None:
    """Move trained parameters by numbers that depend on their names and nothing else; adapters to such numbers.

    An adapter is drawn at random and begins with no effect, and a policy begins as its own reference.
    """
    import torch

    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        with _whole([parameter], changed=True), torch.no_grad():
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            if "lora_" in name:
                parameter.copy_(drawn * 0.2)
            else:
                parameter.add_((drawn * 0.05).to(parameter.device))


def _whole(parameters: list, *, changed: bool = False):
    """Parameters put together on every process for the while, where ZeRO-3 has divided them."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if changed else None)


def load_models(path: str, *, scale: float = REFERENCE["reference_scale"]) -> tuple:
    """The tokenizer, the policy before training and the reference of `REFERENCE`, moved so far, in float64."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.support.tiny import perturbed

    load = lambda: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)  # noqa: E731
    reference = perturbed(load(), seed=REFERENCE["reference_seed"], scale=scale)
    return AutoTokenizer.from_pretrained(path), load().double(), reference.double()


# ---- Training ----


def train(spec: dict, output_dir: str, **trainer_arguments: Any):
    """The trainer of a specification, trained; a further key is `resume_from_checkpoint`."""
    trainer = build(spec, output_dir, **trainer_arguments)
    trainer.train(resume_from_checkpoint=spec.get("resume_from_checkpoint"))
    return trainer


def parameters(trainer) -> dict:
    """The trained parameters by name, on the CPU; every process must call this where an engine divides them."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with _whole(list(trained.values())):
        # Those of FSDP2 are put together by `full_tensor`.
        found = {name: getattr(p.detach(), "full_tensor", p.detach)() for name, p in trained.items()}
        return {name: tensor.cpu().clone().contiguous() for name, tensor in found.items()}


def entries(trainer) -> list[dict]:
    """What a trainer logged of its steps."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def result(trainer) -> Run:
    """The `Run` of a trainer that has trained; an entry of its logs for each step."""
    logs = [{k: v for k, v in entry.items() if "_per_second" not in k} for entry in entries(trainer)]
    return Run(parameters(trainer), logs)


def complete(spec: dict, folder: Path) -> Run:
    """Train and evaluate as a specification says; every process must call this.

    Further keys: `saves` (the model at the end), and `win_rate` (of greedy responses against the base's).
    """
    import torch

    from trl_ext.trainers.policies import remember_base

    with precision(spec.get("dtype", "float64")):
        trainer = build(spec, str(folder))
        if spec.get("win_rate"):
            remember_base(trainer)
        start = parameters(trainer)
        trainer.train(resume_from_checkpoint=spec.get("resume_from_checkpoint"))
        run = result(trainer)
        run.start, run.folder, run.facts = start, folder, _facts(trainer)
        if "held_out" in spec:
            run.evaluation = {k: v for k, v in trainer.evaluate().items() if isinstance(v, (int, float))}
        if spec.get("win_rate"):
            run.evaluation |= _win_rate(trainer, spec["held_out"])
        if spec.get("saves"):
            trainer.save_model()
            if spec["trainer"] == "RewardTrainer":
                run.scores = torch.cat(trainer.score_pairs(trainer.train_dataset))
    return run


def _win_rate(trainer, rows: list[dict]) -> dict[str, float]:
    """Greedy responses of the trained policy against its base's, judged by the sum of their characters."""
    from trl_ext.evaluation import GroundTruthJudge
    from trl_ext.held_out.generations import GenerationEvaluation, GenerationSettings

    prompts = [{"row_id": row["row_id"], "prompt": row["prompt"]} for row in rows]
    settings = GenerationSettings(max_prompt_tokens=None, max_new_tokens=8)
    judge = GroundTruthJudge(lambda prompt, response, **_: sum(map(ord, response)))
    summary = GenerationEvaluation(trainer, prompts, settings, judge=judge).compare().summary
    tokens = summary["generations"]["policy"]["mean_tokens"]
    return {"win_rate": summary["win_rate"]["half"]["rate"], "mean_tokens": tokens}


def _facts(trainer) -> dict[str, Any]:
    from accelerate.utils import gather_object

    from trl_ext.models.packing import packing_of
    from trl_ext.runs.engine import engine_in_force

    accelerator, packing = trainer.accelerator, getattr(trainer, "packing", None)
    plugin = accelerator.state.deepspeed_plugin
    facts = {
        "processes": accelerator.num_processes,
        "engine": engine_in_force(trainer.args),
        "in_force": accelerator.distributed_type.value,
        "zero_stage": None if plugin is None else plugin.zero_stage,
        "shards": sum(hasattr(parameter, "full_tensor") for parameter in trainer.model.parameters()),
    }
    parts = [part["group"] for part in getattr(trainer, "_buffered_inputs", None) or [] if "group" in part]
    facts["groups"] = gather_object([sorted({group for part in parts for group in part.tolist()})])
    if packing is not None:
        facts |= {name: getattr(packing, name) for name in ("packed_tokens", "padded_tokens", "left_padded")}
        reference = getattr(trainer, "ref_model", None)
        facts["reference"] = reference is not None and packing_of(reference).packed_tokens > 0
    return facts


# ---- Several processes ----


def launch(
    engine: str | None,
    command: list[str],
    folder: Path,
    *,
    processes: int = 2,
    cwd: Path = REPOSITORY,
    settings: dict | None = None,
) -> subprocess.CompletedProcess:
    """Run a Python command as several processes, on the CPU in float32 unless `settings` say otherwise.

    Under torchrun, as is `FSDP2_ON_THE_CPU`, or under the configuration of `accelerate_configs` with the name of an
    engine.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if engine == FSDP2_ON_THE_CPU:
        environment |= FSDP2
    elif engine is not None:
        configuration = yaml.safe_load((REPOSITORY / "accelerate_configs" / f"{engine}.yaml").read_text())
        configuration |= {"num_processes": processes, "main_process_port": 0, **(settings or ON_THE_CPU)}
        (folder / "accelerate.yaml").write_text(yaml.safe_dump(configuration))
        launcher = ["-m", "accelerate.commands.launch", "--config_file", str(folder / "accelerate.yaml")]
    options = {"cwd": cwd, "env": environment, "capture_output": True, "text": True, "timeout": 600}
    return subprocess.run([sys.executable, *launcher, *command], **options)


def in_processes(processes: int, *command: str, cwd: Path = REPOSITORY) -> None:
    """Run a Python command as several processes on the CPU, to a good end."""
    launched = launch(None, list(command), cwd, processes=processes, cwd=cwd)
    assert launched.returncode == 0, launched.stderr[-8000:]


def train_under(
    engine: str | None, specs: dict[str, dict], folder: Path, *, processes: int = 2, settings: dict | None = None
) -> dict[str, Run]:
    """Complete each specification in turn in one launch of several processes."""
    from safetensors.torch import load_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "specs.json").write_text(json.dumps(specs))
    command = ["-m", "tests.support.train_once", str(folder / "specs.json"), str(folder)]
    launched = launch(engine, command, folder, processes=processes, settings=settings)
    assert launched.returncode == 0, launched.stderr[-8000:]
    runs = {}
    for name in specs:
        parts: dict[str, dict] = {"start": {}, "parameters": {}, "scores": {}}
        for key, tensor in load_file(folder / f"{name}.safetensors").items():
            kind, _, own_name = key.partition("/")
            parts[kind][own_name] = tensor
        told = json.loads((folder / f"{name}.json").read_text())
        runs[name] = Run(**{**parts, "scores": parts["scores"].get("pairs")}, **told, folder=folder / name)
        assert runs[name].facts["processes"] == processes
    return runs


def shard_on_the_cpu() -> None:
    """Let accelerate use FSDP2 on a CPU, which it does on accelerators alone."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    begin = AcceleratorState.__init__

    def begin_sharded(self, *args, fsdp_plugin=None, **kwargs):
        begin(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = begin_sharded


def main() -> None:
    from accelerate import Accelerator
    from safetensors.torch import save_file

    from trl_ext.rollouts import end_processes

    if "ACCELERATE_USE_DEEPSPEED" in os.environ:
        import deepspeed

        # Collectives by gloo alone: DeepSpeed else compiles its own for one machine's processes, which takes a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if os.environ.get("ACCELERATE_USE_FSDP") and os.environ.get("ACCELERATE_USE_CPU") == "true":
        shard_on_the_cpu()
    specs, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for name, spec in specs.items():
        run = complete(spec, folder / name)
        if os.environ.get("RANK", "0") == "0":
            kinds = {"start": run.start, "parameters": run.parameters}
            kinds |= {} if run.scores is None else {"scores": {"pairs": run.scores}}
            tensors = {f"{kind}/{own}": tensor for kind, found in kinds.items() for own, tensor in found.items()}
            save_file(tensors, folder / f"{name}.safetensors")
            told = {"logs": run.logs, "evaluation": run.evaluation, "facts": run.facts}
            (folder / f"{name}.json").write_text(json.dumps(told))
    end_processes(Accelerator())


if __name__ == "__main__":
    main()
