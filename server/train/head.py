"""`foretoken train draft` and `foretoken train head`: drafters for somebody's target, from text to a folder that serves beside it.

The menu of heads is here: which settings and class a method means.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from transformers import LlamaForCausalLM

from ...engine.model_folder import find_folder
from ...kernels.gguf_files import gguf_files
from ...proposers.training.draft import DraftTrainee
from ...proposers.training.frozen import FrozenTarget
from ...proposers.training.heads.base import Head
from ...proposers.training.heads.dflash import DFlash, DFlashSettings
from ...proposers.training.heads.dflash2 import DFlash2, DFlash2Settings
from ...proposers.training.heads.eagle import Eagle, EagleSettings
from ...proposers.training.heads.eagle3 import Eagle3, Eagle3Settings
from ...proposers.training.heads.medusa import Medusa, MedusaSettings
from ...proposers.training.heads.mlp_speculator import MlpSpeculator, MlpSpeculatorSettings
from ...proposers.training.heads.mtp import Mtp, MtpSettings
from ...proposers.training.heads.pard import Pard, PardSettings
from ...proposers.training.heads.uno import Uno, UnoSettings
from ...proposers.training.reading import DataError
from ...proposers.training.target import Shape
from ...proposers.vocabularies import first_difference, read_tokenizer
from .drafter_data import ANSWERS, TEXT, learned_counts, prepare
from .options import DraftOptions, HeadOptions
from .run import Machine, WorkFolder, log, open_to_readers, train

FIRST_STAGE = 0.5                    # of an MLP speculator's training: on the data itself, before what the target makes of it
SERVED_TOKENS = 5                    # guesses at a time, in the command to paste, where nothing else was asked for

T = TypeVar("T")


def train_draft(options: DraftOptions) -> None:
    """Generate, distil, export. Raises DataError, what `generate` raises, and KeyboardInterrupt when asked to stop."""
    training, sources = options.training, options.training.sources
    machine = Machine.choose(training.device, training.precision)
    folder = WorkFolder.claim(sources, {"model": options.model, **asdict(options.prompting), **asdict(options.sizes)})
    if not folder.has(ANSWERS):
        load_target(options.model, "meta")                   # what is no target is refused before it has answered for hours
    data = prepare(sources, options.model, options.prompting, folder, ground_truth=False)
    target = load_target(options.model, machine.device)
    torch.manual_seed(sources.seed)
    model = Shape(**asdict(options.sizes)).build(target.config.vocab_size)
    for name in ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, name, getattr(target.config, name))
    curves = train(DraftTrainee(model, target), folder, ANSWERS, training, machine)
    half = LlamaForCausalLM(model.config).bfloat16()
    half.load_state_dict(model.state_dict())
    half.generation_config = target.model.generation_config
    half.save_pretrained(sources.out)
    data.tokenizer.save_pretrained(sources.out)
    _finish("draft_model", options.model, sources.out, curves, SERVED_TOKENS)


def train_head(options: HeadOptions) -> None:
    """Generate, train, export. Raises as `train_draft`."""
    training, sources = options.training, options.training.sources
    machine = Machine.choose(training.device, training.precision)
    settings = settings_of(options.method, options.num_speculative_tokens, options.settings)
    if isinstance(settings, PardSettings):
        settings = replace(settings, draft=_draft_for(options.model, str(settings.draft)))
    staged = options.method == "mlp_speculator"
    begun = {"model": options.model, "method": options.method, **asdict(options.prompting)}
    begun |= {name: str(value) for name, value in asdict(settings).items()}
    folder = WorkFolder.claim(sources, begun)
    if not folder.has(ANSWERS):
        target = load_target(options.model, "meta")
        with torch.device("cpu" if options.method == "pard" else "meta"):      # which reads its draft
            make_head(target, settings, torch.ones(len(target.head), dtype=torch.int64))
    data = prepare(sources, options.model, options.prompting, folder, ground_truth=staged)
    torch.manual_seed(sources.seed)
    target = load_target(options.model, machine.device)
    counts = learned_counts(data.folder.packed(ANSWERS), target.config.vocab_size)
    head = make_head(target, settings, torch.from_numpy(counts))
    if staged:
        train(head, folder, TEXT, training, machine, FIRST_STAGE)
    curves = train(head, folder, ANSWERS, training, machine, 1 - FIRST_STAGE if staged else 1.0)
    head.export(sources.out)
    if options.method == "pard":     # is a model by itself
        data.tokenizer.save_pretrained(sources.out)
    wanted, most = options.num_speculative_tokens or SERVED_TOKENS, most_guesses(settings)
    _finish(options.method, options.model, sources.out, curves, wanted if most is None else min(wanted, most))


def load_target(model: str, device: str | torch.device) -> FrozenTarget:
    """Raises DataError for one that drafters are not trained for."""
    folder = find_folder(model, None, log.info)
    if gguf_files(folder):
        raise DataError(f"--model {model} is a GGUF file: drafters learn from safetensors, so take the original's")
    try:
        return FrozenTarget.load(folder, device)
    except ValueError as error:
        raise DataError(f"--model {model}: {error}") from error


def settings_of(method: str, num_speculative_tokens: int | None, given: Mapping[str, Any]) -> Any:
    """The method's settings with `given` fields; num_speculative_tokens is the field that says how many tokens are guessed.

    Raises DataError for a field that it does not have, naming those that it has, and for a value that cannot be one of that field.
    """
    k = num_speculative_tokens
    match method:
        case "eagle3":
            return _settings(Eagle3Settings, given, num_steps=k)
        case "eagle":                # learns one step at a time, whatever is asked of it later
            return _settings(EagleSettings, given)
        case "medusa":
            return _settings(MedusaSettings, given, num_heads=k)
        case "mlp_speculator":
            return _settings(MlpSpeculatorSettings, given, num_positions=k)
        case "mtp":
            return _settings(MtpSettings, given, num_steps=k)
        case "pard":
            if "draft" not in given:
                raise DataError("pard adapts a draft model: make one with `foretoken train draft`, and name it by --set draft=FOLDER")
            return _settings(PardSettings, given, num_tokens=k)
        case "uno":
            return _settings(UnoSettings, given, num_tokens=k)
        case "dflash":
            return _settings(DFlashSettings, given, block_size=None if k is None else k + 1)
        case "dflash2":
            return _settings(DFlash2Settings, given, block_size=None if k is None else k + 1)
        case _:
            raise DataError(f"there is no method {method!r} to train a head for")


def make_head(target: FrozenTarget, settings: Any, counts: Tensor) -> Head:
    """The head that the settings are those of. counts: [vocabulary], of learned tokens. Raises DataError if it does not suit the target."""
    try:
        match settings:
            case Eagle3Settings():
                return Eagle3(target, settings, counts)
            case EagleSettings():
                return Eagle(target, settings)
            case MedusaSettings():
                return Medusa(target, settings)
            case MlpSpeculatorSettings():
                return MlpSpeculator(target, settings)
            case MtpSettings():
                return Mtp(target, settings)
            case PardSettings():
                return Pard(target, settings)
            case UnoSettings():
                return Uno(target, settings)
            case DFlash2Settings():
                return DFlash2(target, settings)
            case _:
                return DFlash(target, settings)
    except ValueError as error:
        raise DataError(f"{error} (--set NAME=VALUE changes a setting)") from error


def most_guesses(settings: Any) -> int | None:
    """Tokens that such a head can guess at a time when served; None: as many as it is asked for."""
    match settings:
        case MedusaSettings():
            return settings.num_heads
        case MlpSpeculatorSettings():
            return settings.num_positions
        case DFlashSettings():
            return settings.block_size - 1
        case _:
            return None


def _draft_for(target: str, draft: str) -> Path:
    """The folder of a draft that is to be adapted. Raises DataError if it reads text as other ids than the target does."""
    target_folder, folder = (find_folder(name, None, log.info) for name in (target, draft))
    if difference := first_difference(read_tokenizer(target_folder), read_tokenizer(folder)):
        raise DataError(f"--set draft={draft}: {difference}; pard needs a draft with the target's own vocabulary")
    return folder


def _settings(kind: type[T], given: Mapping[str, Any], **defaults: int | None) -> T:
    known: tuple[Any, ...] = fields(kind)  # pyright: ignore[reportArgumentType]
    if unknown := [name for name in given if name not in {field.name for field in known}]:
        names = ", ".join(field.name if field.default is MISSING else f"{field.name}={field.default}" for field in known)
        raise DataError(f"--set {unknown[0]}: there is no such setting; this method has {names}")
    hints = get_type_hints(kind)
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}  # a recipe has lists
    for name, value in given.items():
        try:
            TypeAdapter(hints[name]).validate_python(value, strict=True)
        except ValidationError as error:
            raise DataError(f"--set {name}={value}: {error.errors()[0]['msg'].lower()}") from error
        is_size = hints[name] in (int, int | None) and name != "mask_token"
        lowest = 1 if is_size else 0  # shares, weights and a token's id may be 0
        if isinstance(value, (int, float)) and value < lowest and not isinstance(value, bool):
            raise DataError(f"--set {name}={value}: it must be at least {lowest}")
    return kind(**({name: value for name, value in defaults.items() if value is not None} | given))


def _finish(method: str, model: str, out: Path, curves: Path, k: int) -> None:
    open_to_readers(out)
    config = json.dumps({"method": method, "model": str(out), "num_speculative_tokens": k})
    print(f"trained {out} (curves and log in {curves}); serve it with")
    print(f"  foretoken serve {shlex.quote(model)} --speculative-config {shlex.quote(config)}")
