"""Train a character transformer on the sources of Python's standard library, which every machine has.

``python train.py --lr 0.003 --weight-decay 0.1 --dropout 0.1`` trains by itself; ``jap-submit sweep.sh`` trains eight
settings together, each with the numbers it has alone. Dropout is a global of model.py: what this process sets there
is what trains, in the engine too.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path

import model
import torch
from torch import nn

import slurm_jap as jap


def load_text(limit: int) -> torch.Tensor:
    """The first ``limit`` characters of the standard library's modules, by name, as ASCII codes (limit,)."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += bytes(code for code in path.read_bytes() if code < model.VOCABULARY)
        if len(text) >= limit:
            break
    if len(text) < limit:
        sys.exit(f"{folder} holds {len(text)} characters of source, {limit} are needed: pass a smaller --characters")
    return torch.tensor(list(text[:limit]), dtype=torch.long)


def sample(
    text: torch.Tensor, rows: int, context: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random excerpts (rows, context) and the characters that follow each of theirs (rows, context)."""
    starts = torch.randint(len(text) - context, (rows, 1), generator=generator)
    positions = starts + torch.arange(context)
    return text[positions], text[positions + 1]


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def metrics(output: torch.Tensor, target: torch.Tensor) -> dict[str, tuple[torch.Tensor, int]]:
    total = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return {"validation_loss": (total, target.numel())}


def parameter_groups(network: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Weight matrices decay; norms, biases and positions do not."""
    matrices = [p for name, p in network.named_parameters() if p.dim() > 1 and "positions" not in name]
    others = [p for name, p in network.named_parameters() if p.dim() <= 1 or "positions" in name]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--characters", type=int, default=200_000, help="length of the text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="FILE", help="write the trained parameters there")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    data_order = torch.Generator().manual_seed(args.seed)
    text = load_text(args.characters)
    held_out = len(text) // 10
    training_text, validation_text = text[:-held_out], text[-held_out:]
    validation = [sample(validation_text, args.batch_size, args.context, data_order) for _ in range(4)]

    model.DROPOUT = args.dropout
    network = model.CharTransformer(depth=args.depth, width=args.width, heads=args.heads, context=args.context)
    optimizer = torch.optim.AdamW(parameter_groups(network, args.weight_decay), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    trainer = jap.prepare(
        network,
        optimizer,
        loss_fn,
        microbatches=args.microbatches,
        blocks=[network.embed, *network.layers, network.head],
        clip_grad_norm=1.0,
    )

    for step in range(1, args.steps + 1):
        codes, following = sample(training_text, args.batch_size, args.context, data_order)
        result = trainer.step(codes, target=following)
        scheduler.step()
        print(f"step {step} loss {float(result.loss):.9g}", flush=True)

    validation_loss = trainer.evaluate(validation, metrics)["validation_loss"]
    jap.report(validation_loss=validation_loss, loss=float(result.loss))
    print(f"validation loss {validation_loss:.9g}")

    if args.save:
        torch.save(trainer.state_dict(), args.save)


if __name__ == "__main__":
    main()
