"""Tiny tokenizers with chat templates, and chats that are trained on."""

import json

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel

from concertina_trainer import cli

END, TURN, START = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {{- message.content + '<|im_end|>' }}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
MARKED = CHATML.replace(
    "{{- message.content + '<|im_end|>' }}\n    {%- else",
    "{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}\n    {%- else",
)
REASONING = """{%- set last = namespace(user=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.index0 > last.user %}
        {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""As Qwen 3's: only the turns after the last question of the user have their reasoning."""
TOOLS = """{{- bos_token }}
{%- if tools %}{{- '[tools]' + (tools | tojson) + '\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}{% continue %}{%- endif %}
    {%- if message.role == 'system' and not loop.first %}{{- raise_exception('the system speaks first') }}{%- endif %}
    {{- '[INST] ' + message.content + ' [/INST]' }}
{%- endfor %}
"""
"""As Mistral's: with tools, loop controls and an error, and without a beginning of the assistant's turn."""
TEMPLATES = {"chatml": CHATML, "marked": MARKED, "reasoning": REASONING, "tools": TOOLS}


def question(number):
    return f"What is the name of number {number}?"


def answer(number):
    return f"It is called naïve-{7 * number % 11}."


def chat(*numbers, system="You name numbers."):
    """Return a chat with a question and an answer for each number."""
    turns = [
        {"role": role, "content": say(number)}
        for number in numbers
        for role, say in (("user", question), ("assistant", answer))
    ]
    return {"messages": [{"role": "system", "content": system}, *turns]}


def tokenizer(folder, template=CHATML, vocab_size=330):
    """Write a byte-level BPE with a chat template into a folder, and return the path of its tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [END, START, TURN]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator((json.dumps(chat(number), ensure_ascii=False) for number in range(12)), trainer)
    made.add_tokens(["<think>", "</think>"])
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "chat_template": template,
        "eos_token": {"__type": "AddedToken", "content": TURN}, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    if template is None:
        del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder / "tokenizer.json")


def written(path, records):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return str(path)


def built(out, tokenizer, records, length, *options):
    """Build data of chats by the command, and return its exit status."""
    source = written(out.with_suffix(".jsonl"), records)
    command = ["data", "build", "--out", str(out), "--tokenizer", tokenizer, "--chat", "--length", str(length)]
    return cli.main([*command, "--processes", "1", *options, source])
