"""Submissions: model names, generation, scores and packing."""

import codecs
import zipfile
from functools import partial

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.support.files import read_rows, write_rows
from tests.support.public_evaluation import response, write_prompts
from tests.support.refusals import assert_refused
from tests.support.reward_adapters import load_policy, save_full_model
from tests.support.tiny import save_tiny_model
from trl_ext.evaluation import grade_submission
from trl_ext.evaluation.submissions.assets import load_prompts
from trl_ext.evaluation.submissions.submission import (
    generate_submission_file,
    pack_submission,
    score_submission_file,
)
from trl_ext.models import resolve_model_path
from trl_ext.models.loading import model_sha256

METHODS = ["reward_model", "dpo", "ipo", "aot", "grpo", "drgrpo", "gspo", "offline_best", "online_best"]
TEXTS = ["Say red.", "Say a much longer thing, please, and then stop.", "Why?", "Tell me of the sea.", "And?"]


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("assets") / "prompts.jsonl", TEXTS)


def test_a_mistyped_path_is_refused_at_once(tmp_path, monkeypatch):
    """It is not looked for on the hub, which takes over a minute."""
    for name in ("models/aot-toy/config.json", "models/log/x"):
        write_rows(tmp_path / name, [])
    monkeypatch.chdir(tmp_path)
    missing = ["runs/no", "./no", "/no/such", "~/no", "a/b/c", "no/", "no.gguf", "models/aot"]
    for name, told in {**dict.fromkeys(missing, "no model folder '"), "models/log": "config.json"}.items():
        assert_refused(lambda name=name: resolve_model_path(name), name, told, error=FileNotFoundError)
    for name in ("gpt2", "Qwen/Qwen2.5-1.5B-Instruct", "models/aot-toy"):
        assert resolve_model_path(name) == name


class TestGenerate:
    def test_rows_are_the_models_own_greedy_responses(self, tiny_model_path, prompts_file, tmp_path):
        """Against transformers' own loop over single tokens, one prompt at a time; prompts lose their beginning."""
        out = tmp_path / "policy_generations" / "aot.jsonl"
        limits = {"max_new_tokens": 6, "max_prompt_tokens": 40, "batch_size": 2}
        generate_submission_file(tiny_model_path, out, prompts_jsonl=prompts_file, **limits)
        model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
        tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
        rows = read_rows(out)
        assert [row["row_id"] for row in rows] == [f"p{i}" for i in range(5)]
        assert [row["prompt_text"] for row in rows] == TEXTS
        for row, text in zip(rows, TEXTS, strict=True):
            rendered = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
            )
            ids, response_ids = tokenizer(rendered)["input_ids"][-40:], []
            while len(response_ids) < 6 and tokenizer.eos_token_id not in response_ids:
                logits = model(torch.tensor([ids + response_ids])).logits[0, -1]
                response_ids.append(int(logits.argmax()))
            assert row["generated_num_tokens"] == len(response_ids)
            assert row["response_text"] == tokenizer.decode(response_ids, skip_special_tokens=True)
            assert set(row) == {"row_id", "prompt_text", "response_text", "generated_num_tokens"}

    def test_another_model_or_other_prompts(self, tiny_model_path, prompts_file, tmp_path):
        out, settings = tmp_path / "aot.jsonl", {"prompts_jsonl": prompts_file, "max_new_tokens": 2}
        generate_submission_file(tiny_model_path, out, **settings)
        before = out.read_bytes()
        save_tiny_model(tmp_path / "other", seed=1)
        other = partial(generate_submission_file, tmp_path / "other", out, **settings)
        assert_refused(other, str(out), "made with model_sha256", "choose another file", error=FileExistsError)
        others = write_prompts(tmp_path / "prompts.jsonl", [*TEXTS[:4], "Else?"])
        changed = partial(generate_submission_file, tiny_model_path, out, **{**settings, "prompts_jsonl": others})
        assert_refused(changed, str(out), "prompts_sha256", error=FileExistsError)
        assert out.read_bytes() == before
        out.unlink()
        assert other() == read_rows(out)
        reward_model = save_full_model(tiny_model_path, tmp_path / "reward")
        cannot = partial(generate_submission_file, reward_model, tmp_path / "x.jsonl", prompts_jsonl=prompts_file)
        assert_refused(cannot, "is a reward model, which cannot generate")

    def test_an_adapter(self, tiny_model_path, prompts_file, tmp_path):
        """A LoRA whose output is far from zero answers as its merged model does, and not as its base."""
        adapted = load_policy(tiny_model_path)
        adapted.save_pretrained(tmp_path / "adapter")
        adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
        AutoTokenizer.from_pretrained(tiny_model_path).save_pretrained(tmp_path / "merged")
        options = {"prompts_jsonl": prompts_file, "max_new_tokens": 6}
        texts = []
        for model in (tmp_path / "adapter", tmp_path / "merged", tiny_model_path):
            rows = generate_submission_file(model, tmp_path / f"{len(texts)}.jsonl", **options)
            texts.append([row["response_text"] for row in rows])
        assert texts[0] == texts[1] != texts[2]

    def test_the_hash_of_an_adapter_is_of_its_base_too(self, tmp_path):
        base, adapter = tmp_path / "base", tmp_path / "adapter"
        write_rows(adapter / "adapter_config.json", [{"base_model_name_or_path": str(base)}])
        hashes = []
        for name in ("config.json", "model.safetensors", "README.md"):
            write_rows(base / name, ["{}"])
            hashes.append(model_sha256(adapter))
        assert hashes[0] != hashes[1] == hashes[2] == model_sha256(adapter)

    def test_a_model_that_the_hub_has_not_is_asked_for_once(self, prompts_file, tmp_path, monkeypatch):
        asked = []

        def unreachable(self, name, **keywords):
            asked.append(name)
            raise ConnectionError("Name or service not known")

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("asked again"))
        absent = partial(generate_submission_file, "runz/nosuch", tmp_path / "x.jsonl", prompts_jsonl=prompts_file)
        assert_refused(absent, "no model 'runz/nosuch'", "no such folder", "not known", error=FileNotFoundError)
        assert asked == ["runz/nosuch"]


class TestBuildScoreAndPack:
    def test_files_scores_and_archive(self, tiny_model_path, prompts_file, tmp_path):
        folder, archive = tmp_path / "submission", tmp_path / "s.zip"
        reward_model = save_full_model(tiny_model_path, tmp_path / "reward")
        texts = {"chosen_text": "yes", "rejected_text": "no"}
        pairs = [{"row_id": f"q{number}", "prompt_text": text, **texts} for number, text in enumerate(TEXTS)]
        data = {"prompts_jsonl": prompts_file, "prefs_jsonl": write_rows(tmp_path / "prefs.jsonl", pairs)}
        data["max_new_tokens"] = 4
        names = ["policy_generations/aot", "part2/offline_best", "reward_model/public_test_pref_scores"]
        names = [f"{name}.jsonl" for name in names]
        files = [folder / name for name in names]
        for file in files[:2]:
            write_rows(file, [response(f"p{number}", "fine", 3, text) for number, text in enumerate(TEXTS)])
        score_submission_file(reward_model, files[2], prefs_jsonl=data["prefs_jsonl"])
        model = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
        tokenizer = AutoTokenizer.from_pretrained(reward_model)
        for row, pair in zip(read_rows(files[2]), pairs, strict=True):
            assert row["row_id"] == pair["row_id"]
            for side in ("chosen", "rejected"):
                messages = [{"role": "user", "content": pair["prompt_text"]}]
                messages.append({"role": "assistant", "content": pair[f"{side}_text"]})
                ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"]
                with torch.no_grad():
                    expected = float(model(torch.tensor([ids])).logits)
                assert row[f"{side}_score"] == pytest.approx(expected, abs=1e-4)
        packed = pack_submission(folder, archive, METHODS, **data)
        with zipfile.ZipFile(archive) as file:
            assert file.namelist() == sorted(names)
            assert all(file.read(name) == (folder / name).read_bytes() for name in names)
        absent = [f"policy_generations/{name}.jsonl" for name in ("dpo", "ipo", "grpo", "drgrpo", "gspo")]
        assert packed["missing"] == [*absent, "part2/online_best.jsonl"]
        empty = partial(pack_submission, tmp_path, "x.zip", METHODS)
        assert_refused(empty, "no file", "reward_model/", error=FileNotFoundError)
        assert pack_submission(folder, archive, METHODS, **data)["sha256"] == packed["sha256"]

    def test_what_is_packed_is_what_can_be_graded(self, tmp_path):
        """A row of 49 tokens is over the 48 of the embedded prompts; packing and grading name it in the same words."""
        rows = [response(row["row_id"], "word", 9, row["prompt_text"]) for row in load_prompts()]
        rows[7]["generated_num_tokens"] = 49
        path = write_rows(tmp_path / "submission" / "policy_generations" / "aot.jsonl", rows)
        (grade,) = grade_submission(tmp_path / "submission", {"aot": 0.5})["grades"]
        (problem,) = grade["problems"]
        assert (grade["reason"], grade["passed"], grade["figure"]) == ("1 bad row", False, None)
        assert problem == f"row_id {rows[7]['row_id']}: over the token budget of 48: generated_num_tokens is 49"
        pack = partial(pack_submission, tmp_path / "submission", tmp_path / "s.zip", ["aot"])
        assert_refused(pack, f"{path}: {problem}")

    def test_a_byte_order_mark_is_said_and_left_out(self, tmp_path):
        """The course's grader stops at it, as `json.loads` does."""
        folder = tmp_path / "submission"
        rows = [response(row["row_id"], "yes", 2, row["prompt_text"]) for row in load_prompts()]
        path = write_rows(folder / "policy_generations" / "aot.jsonl", rows)
        plain, (expected,) = path.read_bytes(), grade_submission(folder, {"aot": 0.5})["grades"]
        path.write_bytes(codecs.BOM_UTF8 + plain)
        (grade,) = grade_submission(folder, {"aot": 0.5})["grades"]
        assert {**grade, "warnings": []} == expected
        packed = pack_submission(folder, tmp_path / "s.zip", ["aot"])
        with zipfile.ZipFile(tmp_path / "s.zip") as archive:
            assert archive.read("policy_generations/aot.jsonl") == plain
        (warning,), (packing,) = grade["warnings"], packed["warnings"]
        assert warning.startswith("begins with a UTF-8 byte order mark") and packing == f"{path}: {warning}"
