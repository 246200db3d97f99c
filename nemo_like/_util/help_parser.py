"""A parser of a command line whose help shows examples first, then the options in groups."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from nemo_like._util.console import examples
from nemo_like._util.words import did_you_mean

GROUPS = {
    "model": """model init dtype layers lora four_bit qlora lora_rank lora_alpha lora_dropout lora_targets tokenizer
        trust_remote_code vocab_size input_shape images image_size audio_seconds""",
    "parallelism": """gpus device dp_shard calibrate""",
    "memory": """modes budget memory fit fit_memory""",
    "training": """data eval_data pack train_on seq_len max_seq_len batch_size global_batch micro_batch steps epochs lr
        schedule warmup_steps lr_floor weight_decay beta1 beta2 clip seed eval_every eval_samples""",
    "output": """config settings_file settings_to paste_as runs repeats count explain what_if
        check minutes used strip check_memory calibrate_from ran_with gpu_file all_ops log_every wide cache json
        save checkpoint_dir save_every keep resume sync_save output export merge tensorboard wandb""",
}
"""The options of each group in the help, by the attribute that they set; those of a job name their group themselves."""
_GROUP_OF = {option: title for title, options in GROUPS.items() for option in options.split()}


class HelpParser(argparse.ArgumentParser):
    """A parser whose help begins with its purpose and its `lines` of examples, and has its options in `GROUPS`."""

    def __init__(self, *, purpose: str = "", lines: Iterable[str] = (), **settings: Any) -> None:
        self._groups: dict[str, Any] = {}
        # By the attribute of an option, its word and the smallest number that it may be.
        self.least: dict[str, tuple[str, float]] = {}
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)
        if purpose:
            self.description = f"{purpose}\n\n{examples(self.prog, lines)}"
            self.usage = f"{self.prog} [options]"

    def option_names(self) -> list[str]:
        """Return the options that there are, as Python names."""
        return [word.lstrip("-").replace("-", "_") for action in self._actions for word in action.option_strings]

    def error(self, message: str) -> NoReturn:
        """End with code 2 and one line, which names the option or command nearest to a misspelt one."""
        near = ""
        if match := re.match(r"unrecognized arguments: (--[\w-]+)", message):
            parser = self.command or self
            near = did_you_mean(
                match[1], [f"--{name.replace('_', '-')}" for name in parser.option_names() if len(name) > 1]
            )
        elif match := re.search(r"invalid choice: ('[^']*') \(choose from (.*)\)", message):
            near = did_you_mean(match[1].strip("'"), [word.strip(" '") for word in match[2].split(",")])
        prog = self.prog if self.command is None else self.command.prog
        self.exit(2, f"{prog}: error: {message}{'.' * bool(near)}{near}\n")

    command: HelpParser | None = None  # Parser of the subcommand, where there is one.

    def in_options(self, message: str) -> str:
        """Return an error's message with its keywords as the command line has them: ``--tp 3`` for ``tp=3``.

        Python in it, such as ``StepSpec(optimizer='sgd')``, stays as it is.
        """
        words = {action.dest: action.option_strings[0] for action in self._actions if action.option_strings}

        def option(pair: re.Match[str]) -> str:
            name, value = pair[1], pair[2].strip("'\"")
            if name not in words or message.count("(", 0, pair.start()) > message.count(")", 0, pair.start()):
                return pair[0]
            return words[name] if value == "True" else f"{words[name]} {value}"

        return re.sub(r"(?<![\w.-])([a-z_0-9]+)=('[^']*'|[\w.%-]*\w%?)", option, message)

    def add_options(self, options: Mapping[str, Mapping[str, Any]]) -> None:
        """Add options by their words, each with the keywords of `add_argument`."""
        for word, settings in options.items():
            self.add_argument(word, **settings)

    def add_argument(
        self, *names: Any, group: str | None = None, least: float | None = None, **settings: Any
    ) -> argparse.Action:
        """Add an option to its `group`, by default the one that `GROUPS` has it in; it is a KeyError where none has.

        least: the smallest number that it may be, for `nemo_like.commands.early_checks`.
        """
        option = settings.get("dest") or str(names[0]).lstrip("-").replace("-", "_")
        self.least |= {} if least is None else {option: (names[0], least)}
        if option in ("h", "version") or not str(names[0]).startswith("-"):
            return super().add_argument(*names, **settings)
        title = group or _GROUP_OF[option]
        if settings.get("type") in (int, float) and "metavar" not in settings:
            settings["metavar"] = "N" if settings["type"] is int else "X"
        if not self._groups:
            self._groups = {group: self.add_argument_group(group) for group in GROUPS}
        added: argparse.Action = self._groups[title].add_argument(*names, **settings)
        if added.required:
            self.usage = f"{self.prog} {names[0]} {added.metavar or added.dest.upper()} [options]"
        return added
