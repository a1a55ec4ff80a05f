"""Teachers and judges behind a URL: whether they answer, and whether a teacher has the policy's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from async_rlhf.actors.data.tokens import PromptTokenizer
from async_rlhf.actors.reference import is_address
from async_rlhf.actors.rewards.settings import TransientError
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.run.config import Config
from async_rlhf.run.scoring import reward_specs

_PROBED = 64  # tokens of the vocabulary


def unanswered(config: Config) -> Iterator[str]:
    """Remarks on teachers and judges behind a URL where nothing answers. Raises ConfigError for a teacher with other tokens."""
    if config.launch.kind != "local":  # other hosts may reach what this machine does not
        return
    own = config.scoring.reference
    teachers = {f"scoring.reference.by_source.{source}": path for source, path in own.by_source.items() if is_address(path)}
    if is_address(own.path):
        teachers["scoring.reference.path"] = own.path
    servers = {**teachers}
    for spec in reward_specs(config):
        if spec.target == "judge" and isinstance(url := spec.options.get("url"), str):
            servers[f"rewards.options.{spec.name}.url"] = url
    if servers:
        from async_rlhf.actors.rewards import endpoint  # imports an HTTP client, which few need

        for setting, url in servers.items():
            remarks = [*endpoint.unanswered(setting, url)]
            if setting in teachers and not remarks and (Path(config.model) / "tokenizer.json").is_file():
                remarks = [*_tokens_of(config, setting, url)]
            yield from remarks


def _tokens_of(config: Config, setting: str, url: str) -> Iterator[str]:
    """Whether a teacher reads the policy's ids as the policy does, where its server says its tokens' texts. Raises ConfigError;
    a remark where it does not answer yet."""
    from async_rlhf.actors.scoring.served_teacher import other_texts

    texts = PromptTokenizer(Path(config.model)).texts(_PROBED)
    try:
        others = other_texts(url, texts, config.scoring.reference.api_key_env)
    except TransientError as error:
        yield f"{setting} = {url!r}: {error}. The run asks it again."
        return
    except ValueError as error:
        raise ConfigError(f"{setting}: {error}. A teacher is served so that it says this, as vllm serve does") from error
    if len(others) > len(texts) // 4:  # a server may write a few otherwise
        token, text = others[0]
        raise ConfigError(
            f"{setting} = {url!r} has other tokens than model = {config.model!r}: {len(others)} of {len(texts)} differ, "
            f"{token} is {text!r} there and {texts[token]!r} here. Serve a teacher of its family, with the same tokenizer.json"
        )
