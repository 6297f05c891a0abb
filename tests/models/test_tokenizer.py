"""Tokenizers: text there and back, in one go and as it comes, and which tokens of a conversation are answers."""

from __future__ import annotations

import codecs
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.models.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEXT = ["hello world, a small text about nothing much", "user assistant system think", "Grüße, € and 😀 too"] * 4
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hello 😀"},
    {"role": "assistant", "content": "small text"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "nothing €"},
]

# What models in use do, each in a line or two of our own.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMS = (  # content is trimmed, a turn has no newline after it
    "{{ bos_token }}{% for m in messages %}{{ '[' + m.role + ']' + m.content | trim + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
THINKS = (  # the last answer is preceded by thoughts that earlier ones lose
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if loop.last and m.role == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '</s>' }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
PLAIN = (  # no special token ends a turn
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def _write(folder: Path, kind: str, **config: Any) -> Path:
    """A small tokenizer of a kind in use: GPT-2's bytes, or SentencePiece's with bytes for what it does not know."""
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if kind == "gpt":
        engine = Engine(models.BPE())
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        engine.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        engine.train_from_iterator(
            TEXT, trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet)
        )
    else:
        engine = Engine(models.BPE(byte_fallback=True, unk_token="<unk>"))
        engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        fallback = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *SPECIAL, *fallback])
        engine.train_from_iterator([text for text in TEXT if text.isascii()], trainer)
        content = json.loads(engine.to_str())
        content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
        engine = Engine.from_str(json.dumps(content))
        engine.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    engine.enable_truncation(8)  # as some files have it: it must not cut what is encoded
    engine.enable_padding(length=8)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(engine.to_str(), encoding="utf-8")
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "bytes": ByteTokenizer(),
        "gpt": load_tokenizer(_write(folder / "gpt", "gpt")),
        "sentencepiece": load_tokenizer(_write(folder / "sentencepiece", "sentencepiece") / "tokenizer.json"),
    }


KINDS = ("bytes", "gpt", "sentencepiece")


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize("kind", KINDS)
def test_text_there_and_back(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]

    @settings(max_examples=60)
    @given(st.text(st.characters(exclude_categories=["Cs", "Zs", "Cc"]), max_size=30))
    def back(text: str) -> None:
        ids = tokenizer.encode(text)
        assert all(0 <= id < tokenizer.vocab_size for id in ids)
        assert tokenizer.decode(ids) == text
        stream = tokenizer.stream()
        pieces = [stream.put(id) for id in ids]
        assert "".join(pieces) + stream.end() == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces), "half a character was given out"

    back()
    long = " ".join(TEXT)
    ids = tokenizer.encode(long)
    assert len(ids) > 8, "the file's truncation is off"
    assert tokenizer.decode(ids) == long
    assert tokenizer.encode_batch([long, "a"])[0].tolist() == ids


def test_a_stream_of_bytes_is_pythons_decoder_whatever_they_are() -> None:
    """Letters are given out without it, though not inside of a character."""
    for data in itertools.product(b"a\x7f\x82\xac\xc3\xe2\xf0\xff", repeat=4):
        stream, utf8 = ByteTokenizer().stream(), codecs.getincrementaldecoder("utf-8")("replace")
        assert [stream.put(byte) for byte in data] == [utf8.decode(bytes((byte,))) for byte in data]
        assert stream.end() == utf8.decode(b"", final=True)
        assert stream.put(ord("b")) == "b"


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_gives_text_as_soon_as_it_is_whole(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    stream = tokenizer.stream()
    ids = tokenizer.encode("text ok")
    pieces = [stream.put(id) for id in ids]
    assert "".join(pieces) == "text ok", "nothing is held back that is certain"
    assert stream.end() == ""
    stream = tokenizer.stream()
    broken = tokenizer.encode("a😀")[:-1]
    assert "".join(map(stream.put, broken)) == "a"
    assert set(stream.end()) == {"\ufffd"}


def test_bytes_that_are_no_character_are_replaced_and_not_waited_for() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([0x61, 0xFF, 0x62]) == "a\ufffdb"
    stream = tokenizer.stream()
    assert "".join(map(stream.put, [0x61, 0xFF, 0x62])) == "a\ufffdb"


def test_a_stream_does_not_wait_for_ever(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["sentencepiece"]
    broken = tokenizer.encode("😀")[-1]  # a byte from the middle of a character
    stream = tokenizer.stream()
    text = "".join(stream.put(broken) for _ in range(12))
    assert text
    assert set(text) == {"\ufffd"}
    assert stream.put(tokenizer.encode("x")[-1]).endswith("x")


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize("kind", KINDS)
def test_spelling_makes_no_special_token_unless_asked(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    text, id = next((text, id) for text, id in tokenizer.special_tokens.items() if id == tokenizer.eos_id)
    assert id not in tokenizer.encode(f"a{text}b")
    assert id in tokenizer.encode(f"a{text}b", special=True)
    assert tokenizer.decode(tokenizer.encode(f"a{text}b")) == f"a{text}b"
    assert tokenizer.decode([id]) == ""
    assert tokenizer.decode([id], special=True) == text
    assert not set(tokenizer.special_tokens.values()) & set(tokenizer.encode_batch([f"a{text}b"])[0].tolist())


def _answers(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[str]:
    """The runs of masked tokens, as text."""
    ids, mask = tokenizer.encode_chat(messages)
    assert tokenizer.decode(ids, special=True) == tokenizer.render_chat(messages)
    runs: list[list[int]] = []
    for place, (id, answer) in enumerate(zip(ids, mask, strict=True)):
        if answer:
            if not place or not mask[place - 1]:
                runs.append([])
            runs[-1].append(id)
    return [tokenizer.decode(run, special=True) for run in runs]


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize(
    ("template", "first", "last"),
    [
        (None, "small text<|im_end|>", "nothing €<|im_end|>"),
        (CHATML, "small text<|im_end|>", "nothing €<|im_end|>"),
        (TRIMS, "small text</s>", "nothing €</s>"),
        (THINKS, "small text<|im_end|>", "<think>\n\n</think>\n\nnothing €<|im_end|>"),
        (MARKS, "small text</s>", "nothing €</s>"),
        (PLAIN, " small text\n\n", " nothing €\n\n"),
    ],
    ids=["default", "chatml", "trims", "thinks", "marks", "plain"],
)
def test_the_loss_counts_on_answers_and_their_end(
    tokenizers: dict[str, Tokenizer], template: str | None, first: str, last: str
) -> None:
    gpt = tokenizers["gpt"]
    assert isinstance(gpt, HuggingFaceTokenizer)
    tokenizer = HuggingFaceTokenizer(gpt.path, chat_template=template)
    assert _answers(tokenizer, CHAT) == [first, last]
    padded = [{**turn, "content": f"  {turn['content']} \n"} for turn in CHAT]
    if template in (TRIMS, THINKS):  # space around a content moves nothing
        assert [answer.split() for answer in _answers(tokenizer, padded)] == [
            answer.replace("<|im_end|>", " <|im_end|>" if template == THINKS else "<|im_end|>").split()
            for answer in (first, last)
        ]


@pytest.mark.quick
def test_chat_without_a_template_ends_turns_with_eos_and_says_so(
    caplog: pytest.LogCaptureFixture, nothing_said_yet: None
) -> None:
    tokenizer = ByteTokenizer()
    assert _answers(tokenizer, CHAT) == ["small text<|eos|>", "nothing €<|eos|>"]
    assert caplog.text.count("no chat template") == 1
    ids, _ = tokenizer.encode_chat(CHAT)
    assert ids[0] == tokenizer.bos_id
    assert ids.count(tokenizer.eos_id) == len(CHAT)
    prompt = tokenizer.render_chat(CHAT[:2], add_generation_prompt=True)
    assert tokenizer.render_chat(CHAT).startswith(prompt)
    assert prompt.endswith("assistant\n")


@pytest.mark.quick
def test_a_folder_says_what_its_special_tokens_are(tmp_path: Path) -> None:
    folder = _write(tmp_path / "named", "gpt", chat_template=[{"name": "default", "template": CHATML}])
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, None)
    assert tokenizer.chat_template == CHATML
    (folder / "chat_template.jinja").write_text(PLAIN, encoding="utf-8")
    assert load_tokenizer(folder).chat_template == PLAIN
    assert load_tokenizer(folder).fingerprint != tokenizer.fingerprint
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(folder).eos_id is None
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [1, 3], "bos_token_id": 0}))
    assert (load_tokenizer(folder).bos_id, load_tokenizer(folder).eos_id) == (0, 1)
    assert load_tokenizer(_write(tmp_path / "again", "gpt")).vocab_size == tokenizer.vocab_size


def test_faults_of_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which is not there"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has a tokenizer.json. Got .* with tokenizer.model"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(ValueError, match="one that `tokenizers` reads"):
        load_tokenizer(tmp_path)
    _write(tmp_path, "gpt", eos_token="<nothing>")
    with pytest.raises(ValueError, match=r"'<nothing>', which .* does not have"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is JSON"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="0 to 258"):
        ByteTokenizer().decode([259])
    with pytest.raises(ValueError, match="surrogate"):
        ByteTokenizer().encode("\ud800")
