"""Private names of TRL, transformers and accelerate that tests read, call or override: a rename is one edit here.

The tests of `tests/contract` say what the library itself relies on.
"""

from __future__ import annotations

# ---- A policy's rollout and its loss ----


def score_rollout(trainer, rows: list[dict]) -> dict:
    """Sample a response to each row's prompt, score it, and return the batch of tensors."""
    return trainer._generate_and_score_completions(rows)


def compute_loss(trainer, inputs: dict):
    """The loss of a micro-batch of a rollout, with the gradients of the policy."""
    return trainer._compute_loss(trainer.model, inputs)


def logged_metrics(trainer) -> dict[str, list[float]]:
    """What training has recorded since the last log, by name."""
    return trainer._metrics["train"]


def logged_samples(trainer) -> dict:
    """The columns of the table of samples: prompts, completions, advantages, and rewards by name."""
    return trainer._logs


def rollout_batches(trainer) -> list[dict]:
    """The micro-batches of the present rollout."""
    return trainer._buffered_inputs


def tokenized_prompts(trainer, prompts: list) -> list[list[int]]:
    """The ids that a policy's trainer makes of prompts."""
    return trainer._tokenize_prompts(prompts)[0]


def sampled_responses(trainer, prompts: list, *, stock: bool = False) -> list[list[int]]:
    """The ids of one sampled response to each prompt; by TRL's own generation if `stock`."""
    import trl

    generate = trl.GRPOTrainer._generate_single_turn if stock else type(trainer)._generate_single_turn
    return generate(trainer, tokenized_prompts(trainer, prompts), None, {}, 1)[0]


class BeforeLoss:
    """A trainer whose `before_loss` returns the micro-batch that the loss is computed on."""

    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, self.before_loss(inputs))


class AfterRollout:
    """A trainer whose `after_rollout` is given each rollout."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.after_rollout(output)
        return output


class OwnResponses:
    """A trainer whose `respond` makes the ids of responses from those of prompts, in place of the model."""

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        return self.respond(prompt_ids), None


def add_router_loss(monkeypatch, router_loss) -> None:
    """The loss of a router, `router_loss()`, beside TRL's log-probabilities, as of a mixture of experts."""
    import trl

    forward = trl.GRPOTrainer._get_per_token_logps_and_entropies

    def with_router(self, *args, compute_aux_loss, **kwargs):
        assert compute_aux_loss
        log_probs, entropies, _ = forward(self, *args, **kwargs)
        return log_probs, entropies, router_loss()

    monkeypatch.setattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies", with_router)


# ---- Models and model cards ----


def attention_of(model) -> str:
    """The name of a model's implementation of attention."""
    return model.config._attn_implementation


def describe_as(trainer, trainer_class: type, tags: list[str]) -> None:
    """Give a stand-in the name and the paper of a trainer's class, and tags."""
    trainer._tag_names, trainer._name, trainer._paper = tags, trainer_class._name, trainer_class._paper


# ---- Processes ----


def forget_accelerator() -> None:
    """Forget the devices and the precision that an earlier `Accelerator` of this process has set."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
