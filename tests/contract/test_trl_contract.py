"""The names and behaviours of TRL, transformers and PEFT, some private, that trainers, checkpoints and resuming use.

When one of these fails after an upgrade, its message says what moved and what in `trl_ext` stands on it.
"""

from __future__ import annotations

import inspect
import re
from importlib.metadata import version

import peft
import pytest
import torch
import trl
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from packaging.version import Version
from peft.tuners.tuners_utils import BaseTuner
from transformers import AutoModelForSequenceClassification, Trainer, TrainerCallback
from trl.trainer import kto_trainer
from trl.trainer.utils import add_fused_lm_head, shuffle_sequence_dict, split_tensor_dict

from tests.support.rollout_once import prompts
from tests.support.train_once import build
from trl_ext.trainers.policy.trainer import _OF_IMAGES

WINDOW = "trl_ext.trainers.passes.PairPasses.get_batch_samples"
LOSS_STEP = "trl_ext.trainers.preference.trainer.PreferenceTrainer.compute_loss"


@pytest.fixture(scope="module")
def stock(tiny_model_path, tmp_path_factory) -> trl.DPOTrainer:
    """Stock `trl.DPOTrainer`, whose reference differs from its policy, with WPO's outputs on."""
    spec = {"model": tiny_model_path, "trainer": "trl.DPOTrainer", "reference_seed": 1}
    trainer = build({**spec, "args": {"use_weighting": True}}, str(tmp_path_factory.mktemp("stock")))
    trainer.use_weighting = False
    return trainer


@pytest.fixture
def batch(stock) -> dict:
    return next(iter(stock.get_train_dataloader()))


def test_version():
    installed = Version(version("trl"))
    assert Version("1.16") <= installed < Version("1.17"), (
        f"trl {installed} is installed, and the seams of trl_ext are checked against 1.16: run this file against the "
        "new version, mend what it names, and widen the requirement in pyproject.toml"
    )


# ---- The loss step ----


def test_the_output_of_the_head(stock, batch):
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    output = stock.model(**inputs, labels=labels, use_cache=False, fused_lm_head=True)
    for name in ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs"):
        values = getattr(output, name)
        assert values is not None and values.shape == labels[:, 1:].shape, (
            f"TRL's fused LM head no longer gives {name} of each token but the first: {LOSS_STEP} reads it"
        )
    assert not output.log_probs[labels[:, 1:] == -100].any(), (
        "TRL's fused LM head gives log-probabilities where labels are -100: PreferenceTrainer._scores sums all"
    )


def test_reference_log_probabilities_are_named_in_the_data(stock):
    stock._set_signature_columns_if_needed()
    for name in ("ref_chosen_logps", "ref_rejected_logps"):
        assert name in stock._signature_columns, (
            f"DPOTrainer does not name precomputed log-probabilities {name}: PreferenceTrainer._reference reads them"
        )


# ---- The accumulation window ----


def test_get_batch_samples(stock):
    iterator = iter(stock.get_train_dataloader())
    batches, items = stock.get_batch_samples(iterator, 3, torch.device("cpu"))
    assert [len(batch["input_ids"]) for batch in batches] == [4, 4, 4] and items is None, (
        f"Trainer.get_batch_samples no longer returns a list of batches and a count that TRL leaves None: {WINDOW}"
    )
    batches, _ = stock.get_batch_samples(iterator, 3, torch.device("cpu"))
    assert len(batches) == 1, f"the last window is no longer the shorter one: {WINDOW} normalises by its pairs"


def test_a_short_last_window_is_divided_by_its_own_size(tiny_model_path, tmp_path):
    """3 micro-batches accumulated by 2: windows of 2 and of 1."""
    sizes = []

    class Recording(trl.DPOTrainer):
        def compute_loss(self, *args, **kwargs):
            sizes.append(self.current_gradient_accumulation_steps)
            return super().compute_loss(*args, **kwargs)

    spec = {"model": tiny_model_path, "trainer": "trl.DPOTrainer", "pairs": 6}
    spec["args"] = {"gradient_accumulation_steps": 2, "max_steps": 2}
    build(spec, str(tmp_path), trainer_class=Recording).train()
    assert sizes == [2, 2, 1], (
        f"Trainer divides by {sizes} and not by the number of micro-batches in each window: loss_scale undoes that"
    )


# ---- Signatures and sources ----

RESUMABLE = "trl_ext.resilience.training.ResilientTraining"
REFERENCE = "trl_ext.trainers.preference.trainer.PreferenceTrainer._precompute_ref_logps"
PREFERENCE = "trl_ext.trainers.preference.trainer.PreferenceTrainer"
POLICY = "trl_ext.trainers.policy.trainer.PolicyTrainer"
GREEDY = "trl_ext.trainers.policy.generation"
KTO = "trl_ext.KTOTrainer"
GUARD = "trl_ext.resilience.guards.UpdateGuard"
CARD = "trl_ext.trainers.model_card"
PACKING = "trl_ext.models.packing.wrap.Packing"
ROLLOUT = "trl_ext.doctor.examine.read_sampled, where the doctor reads responses and rewards,"
ONLINE, LOG_KEYS = (trl.GRPOTrainer, trl.RLOOTrainer), ('["prompt"]', '["completion"]', '["rewards"][name]')
TRAINERS = (trl.DPOTrainer, trl.GRPOTrainer, trl.RewardTrainer, trl.SFTTrainer, trl.KTOTrainer)

EPOCH = ["self", "model", "epoch", "train_dataloader", "steps_in_epoch", "num_update_steps_per_epoch", "trial"]
EPOCH += ["ignore_keys_for_eval", "start_time", "resume_from_checkpoint", "epochs_trained"]
EPOCH += ["steps_trained_in_current_epoch"]
SINGLE_TURN = ["self", "prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"]
OFF_POLICY_MASK = ["advantages", "per_token_logps", "sampling_per_token_logps", "mask", "off_policy_threshold"]
REWARDS = ["self", "inputs", "prompts", "completions", "completion_ids_list"]
COMPUTE_LOSS = ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]
FORWARD = ["self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"]
FORWARD += ["compute_aux_loss", *_OF_IMAGES]
FUSED_HEAD = ["model", "temperature", "cast_lm_head_to_fp32", "outputs"]
# Of every trainer: what a method takes, and what of ours overrides or calls it.
METHODS = {
    "_get_output_dir": (["self", "trial"], RESUMABLE),
    "_save_checkpoint": (["self", "model", "trial"], RESUMABLE),
    "_load_rng_state": (["self", "checkpoint"], RESUMABLE),
    "_run_epoch": (EPOCH, RESUMABLE),
    "_load_from_checkpoint": (["self", "resume_from_checkpoint", "model"], "trl_ext.ExpertIterationTrainer._begin"),
    "_save": (["self", "output_dir", "state_dict"], "trl_ext.RewardTrainer._save"),
    "get_batch_samples": (["self", "epoch_iterator", "num_batches", "device"], WINDOW),
    "_get_grad_norm": (["self", "model", "grad_norm"], GUARD),
    "_save_optimizer_and_scheduler": (["self", "output_dir"], "trl_ext.OnlinePreferenceTrainer"),
}
# Of single classes and functions.
FUNCTIONS = [
    (trl.DPOTrainer.compute_loss, COMPUTE_LOSS, PREFERENCE),
    (trl.KTOTrainer.compute_loss, COMPUTE_LOSS, KTO),
    (trl.DPOTrainer.compute_ref_log_probs, ["self", "model", "inputs"], PREFERENCE),
    (trl.DPOTrainer._prepare_dataset, ["self", "dataset", "processing_class", "args", "dataset_name"], PREFERENCE),
    (trl.DPOTrainer._precompute_ref_logps, ["self", "dataset", "name", "batch_size"], PREFERENCE),
    (trl.DPOTrainer.create_model_card, ["self", "model_name", "dataset_name", "tags"], CARD),
    (trl.GRPOTrainer._calculate_rewards, REWARDS, f"{POLICY}._calculate_rewards"),
    (trl.GRPOTrainer._tokenize_prompts, ["self", "prompts"], f"{POLICY}._tokenize_prompts"),
    (trl.GRPOTrainer._generate_single_turn, SINGLE_TURN, f"{GREEDY}.greedy_rewards"),
    (trl.GRPOTrainer._get_per_token_logps_and_entropies, FORWARD, f"{POLICY}.score"),
    (trl.GRPOTrainer.get_high_entropy_mask, ["self", "entropies", "mask", "threshold"], f"{POLICY}.loss"),
    (trl.GRPOTrainer.get_off_policy_mask, OFF_POLICY_MASK, f"{POLICY}._response_weights"),
    (add_fused_lm_head, FUSED_HEAD, "trl_ext.trainers.policy.scoring.ScoringTemperature"),
]
# What must stand in the source of a function or module, and what of ours stands on it.
SOURCES = [
    (Trainer._save_checkpoint, "self._save_optimizer_and_scheduler(output_dir)", "trl_ext.OnlinePreferenceTrainer"),
    (Trainer._load_optimizer_and_scheduler, "self.args.device", RESUMABLE),
    (Trainer._save_checkpoint, "save_total_limit=self.args.save_total_limit", RESUMABLE),
    (Trainer._finalize_training, "self.args.save_total_limit == 1", RESUMABLE),
    (BatchSamplerShard, "self.batch_sampler = batch_sampler", "trl_ext.resilience.checkpoints.generators_of"),
    (prepare_data_loader, "sampler.generator", RESUMABLE),
    (trl.DPOTrainer.evaluate, "self.precompute_ref_logps", PREFERENCE),
    (trl.DPOTrainer.prediction_step, "self.compute_loss(", PREFERENCE),
    *(
        (trl.DPOTrainer.__init__, f"self.{name} =", LOSS_STEP)
        for name in ("aux_loss_enabled", "router_aux_loss_coef", "_total_train_tokens", "_tp_size", "_metrics")
    ),
    (trl.DPOTrainer._precompute_ref_logps, "self._precompute_engine = prepare_deepspeed(", REFERENCE),
    (trl.DPOTrainer._precompute_ref_logps, "self._precompute_model_hash", f"{PREFERENCE}._precompute_ref_logps"),
    (trl.DPOTrainer._precompute_ref_logps, "dataset._fingerprint", f"{PREFERENCE}._on_shared_disk"),
    (trl.GRPOTrainer._calculate_rewards, "gather(rewards_per_func)", f"{POLICY}._generate_and_score_completions"),
    *((kind._generate_and_score_completions, f"self._logs{key}", ROLLOUT) for kind in ONLINE for key in LOG_KEYS),
    (trl.GRPOTrainer._generate_single_turn, "generation_kwargs=self.generation_kwargs", GREEDY),
    (trl.GRPOTrainer._generate_single_turn, "generation_config=self.generation_config", GREEDY),
    (kto_trainer, '"KL_completion_ids"', f"{KTO}._prepare_dataset"),
    (trl.KTOTrainer._prepare_dataset, "args.dataset_num_proc", f"{KTO}._prepare_dataset"),
    (add_fused_lm_head, "compact = _use_triton(", PACKING),
    (add_fused_lm_head, "_CHUNKED_LOGPROB_CHUNK_SIZE,", PACKING),
    (add_fused_lm_head, 'kwargs["use_cache"] = False', PACKING),
    (add_fused_lm_head, "getattr(self, backbone_attr)(*args, **kwargs)", PACKING),
    # Hooks of the model inside are called.
    (BaseTuner.forward, "self.model(*args, **kwargs)", PACKING),
    *((kind._save_checkpoint, "create_model_card(", CARD) for kind in TRAINERS),
    (peft.PeftModel.save_pretrained, "create_or_update_model_card(", CARD),
    *(
        (kind.__init__, "self.ref_model = create_model_from_path(", "trl_ext.trainers.policies.reference_in_memory")
        for kind in (trl.DPOTrainer, trl.KTOTrainer, trl.GRPOTrainer)
    ),
]
# Attributes that `GRPOTrainer._compute_loss` reads, and so does ours in its place.
POLICY_ATTRIBUTES = (
    "top_entropy_quantile _entropy_bonus_enabled entropy_coef aux_loss_enabled router_aux_loss_coef "
    "off_policy_mask_threshold vllm_importance_sampling_correction"
)


def parameters_of(function) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_every_trainer(name):
    expected, user = METHODS[name]
    for kind in (Trainer, *TRAINERS):
        method = getattr(kind, name, None)
        assert method is not None, f"{kind.__name__} has no {name} any more: {user} overrides or calls it"
        found = parameters_of(method)
        assert found == expected, f"{kind.__name__}.{name} takes {found} and not {expected}: {user} stands on it"


@pytest.mark.parametrize(("function", "expected", "user"), FUNCTIONS, ids=[f.__qualname__ for f, *_ in FUNCTIONS])
def test_functions(function, expected, user):
    found = parameters_of(function)
    assert found == expected, f"{function.__qualname__} takes {found} and not {expected}: {user} stands on it"


@pytest.mark.parametrize(("owner", "text", "user"), SOURCES, ids=[text for _, text, _ in SOURCES])
def test_sources(owner, text, user):
    assert text in inspect.getsource(owner), f"{owner} no longer has `{text}`: {user} stands on it"


def test_attributes_that_the_policy_loss_reads():
    source = inspect.getsource(trl.GRPOTrainer._compute_loss)
    missing = [name for name in POLICY_ATTRIBUTES.split() if not re.search(rf"self\.{name}\b", source)]
    assert not missing, f"GRPOTrainer._compute_loss does not read {missing} of itself: {POLICY}.loss reads them"


# ---- Saving, and the counters of a run ----


@pytest.fixture(scope="module")
def run(tiny_model_path, tmp_path_factory):
    """One step of TRL's own trainer at a loss of 0, whose counters stand elsewhere when its training begins."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")

    class Recording(trl.DPOTrainer):
        seen: dict = {}

        def _run_epoch(self, *args, **kwargs):
            self.seen["keywords"] = dict(kwargs)
            super()._run_epoch(*args, **kwargs)

        def _compute_loss(self, model, inputs, return_outputs):
            self.seen["tokens"] = inputs["attention_mask"].sum().item()
            return super()._compute_loss(model, inputs, return_outputs) * 0

        def _get_output_dir(self, trial):
            return str(elsewhere)

        def _save(self, output_dir=None, state_dict=None):
            self.seen["saved"] = output_dir
            super()._save(output_dir, state_dict)

    class Restoring(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            trainer.seen["counters"] = (
                trainer._tr_loss.item(),
                trainer._total_loss_scalar,
                trainer._globalstep_last_logged,
            )
            trainer._tr_loss = torch.tensor(6.0)
            trainer._total_loss_scalar, trainer._globalstep_last_logged = 10.0, -1
            trainer._total_train_tokens = 1000

    arguments = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1}
    spec = {"model": tiny_model_path, "trainer": "trl.DPOTrainer", "args": arguments}
    trainer = build(spec, str(tmp_path_factory.mktemp("run")), trainer_class=Recording, callbacks=[Restoring()])
    trainer.elsewhere, trainer.output = elsewhere, trainer.train()
    return trainer


def test_checkpoints_go_where_the_output_folder_is_said_to_be(run):
    checkpoint = run.elsewhere / "checkpoint-1"
    assert (checkpoint / "model.safetensors").is_file() and (checkpoint / "trainer_state.json").is_file(), (
        f"Trainer._save_checkpoint does not write below _get_output_dir: {RESUMABLE} writes beside it so"
    )
    assert run.seen["saved"] == str(checkpoint), (
        f"Trainer._save_checkpoint gave _save the folder {run.seen['saved']}: RewardTrainer._save writes beside it"
    )


def test_an_epoch_is_begun_by_keywords(run):
    for name, value in (("resume_from_checkpoint", None), ("steps_trained_in_current_epoch", 0)):
        assert name in run.seen["keywords"] and run.seen["keywords"][name] == value, (
            f"Trainer no longer gives _run_epoch the keyword {name} ({value} in a new run): {RESUMABLE}._run_epoch "
            "reads it"
        )
    assert "train_dataloader" in run.seen["keywords"], f"{RESUMABLE}._run_epoch reads it"


def test_training_begins_with_counters_at_zero(run):
    assert run.seen["counters"] == (0.0, 0.0, 0), (
        f"before on_train_begin, Trainer's _tr_loss, _total_loss_scalar and _globalstep_last_logged are "
        f"{run.seen['counters']} and not zero and the step: {RESUMABLE} takes up the checkpoint's there"
    )


def test_what_training_begins_with_is_logged(run):
    """A loss of 6 since step -1: 6 / 2 at step 1. Over the run, 10 + 6 for its one step."""
    logged = next(entry for entry in run.state.log_history if "loss" in entry)
    assert logged["loss"] == 3.0, (
        f"Trainer logged a loss of {logged['loss']} and not _tr_loss / (step - _globalstep_last_logged) = 3: "
        f"{RESUMABLE} carries both over"
    )
    assert run.output.training_loss == 16.0, (
        f"the run's loss is {run.output.training_loss} and not (_total_loss_scalar + the losses logged) / steps = 16: "
        f"{RESUMABLE} carries it over"
    )
    tokens = 1000 + run.seen["tokens"]
    assert logged["num_tokens"] == tokens, (
        f"num_tokens is {logged['num_tokens']} and not _total_train_tokens and the batch's, {tokens}: "
        f"{RESUMABLE}.carried_over names it"
    )


def test_the_device_is_what_the_arguments_hold(run):
    before = run.args.__dict__["_setup_devices"]
    run.args.__dict__["_setup_devices"] = torch.device("meta")
    try:
        assert run.args.device.type == "meta", (
            "TrainingArguments.device is no longer `_setup_devices` of the arguments' __dict__: "
            f"{RESUMABLE} sets it, as torch loads nothing to a numbered CPU"
        )
    finally:
        run.args.__dict__["_setup_devices"] = before


def test_weights_that_were_read_are_marked(tiny_model_path):
    """A language model's files hold no score head, which is random then."""
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model_path, num_labels=1)
    marked = {name: getattr(weight, "_is_hf_initialized", False) for name, weight in model.named_parameters()}
    assert [name for name, read in marked.items() if not read] == ["score.weight"], (
        "from_pretrained no longer marks exactly the weights of the files with _is_hf_initialized: "
        "trl_ext.doctor.setup.reward_model finds a random score head so"
    )


# ---- TRL's own ----


def test_precomputed_references(run):
    """The attributes are there, and a prepared dataset has a fingerprint."""
    assert run._precompute_engine is None and hasattr(run, "_precompute_model_hash"), REFERENCE
    assert isinstance(run.train_dataset._fingerprint, str), "PreferenceTrainer._on_shared_disk names a folder by it"


# ---- A policy's rollout ----


@pytest.fixture(scope="module")
def rollout(policy_path, tmp_path_factory) -> dict:
    """Eight scored responses to two prompts, as they leave `_generate_and_score_completions` of TRL's own trainer."""
    args = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2, "beta": 0.1}
    spec = {"model": policy_path, "trainer": "trl.GRPOTrainer", "args": args}
    trainer = build(spec, str(tmp_path_factory.mktemp("policy")))
    # What Trainer sets before each optimizer step.
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    assert trainer.eos_token_ids == [trainer.processing_class.eos_token_id], (
        f"GRPOTrainer.eos_token_ids is {trainer.eos_token_ids}: {POLICY} tells by it which responses are finished"
    )
    return trainer._generate_and_score_completions([dict(row) for row in prompts(2) for _ in range(4)])


def test_keys_of_a_rollout(rollout):
    expected = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch"}
    expected |= {"old_per_token_logps", "ref_per_token_logps"}
    assert rollout.keys() == expected, f"the keys of a rollout of GRPOTrainer: {POLICY} reads them"
    assert rollout["advantages"].shape == (8,), f"advantages are {rollout['advantages'].shape}: {POLICY}"
    assert rollout["num_items_in_batch"] == rollout["completion_mask"].sum(), (
        f"num_items_in_batch is no longer the rollout's tokens over all processes: {POLICY} divides by it"
    )
    shape = rollout["completion_ids"].shape
    assert all(
        rollout[key].shape == shape for key in ("completion_mask", "old_per_token_logps", "ref_per_token_logps")
    )


def test_further_tensors_stay_with_their_rows(rollout):
    """`bad_reward` and the advantages must come out beside the responses that they are of."""
    sums = rollout["completion_ids"].sum(1)
    marked = {**rollout, "advantages": sums.float(), "bad_reward": sums % 2 == 0}
    for batch in split_tensor_dict(shuffle_sequence_dict(marked), 2):
        own = batch["completion_ids"].sum(1)
        assert torch.equal(batch["advantages"], own.float()) and torch.equal(batch["bad_reward"], own % 2 == 0), (
            f"shuffle_sequence_dict or split_tensor_dict separates rows from what belongs to them: {POLICY}"
        )


def test_the_optimizer_is_made_once_and_its_groups_can_be_divided(stock):
    optimizer = stock.create_optimizer()
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    assert optimizer is stock.create_optimizer() and held == {id(weight) for weight in stock.model.parameters()}, (
        "Trainer.create_optimizer no longer makes one optimizer of all weights of self.model: "
        "trl_ext.trainers.ppo.trainer.PPOTrainer.create_optimizer moves those of the value function to another group"
    )
