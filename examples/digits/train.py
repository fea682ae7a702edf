"""Train a small conv net on scikit-learn's 1,797 bundled images of handwritten digits.

An ordinary training script: ``python train.py --lr 0.05 --dropout 0.1`` trains by itself, in this process. As a member
of a sweep (``jap-submit sweep.sh``) it prints the same losses and saves the same parameters, trained by the engine.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import slurm_jap as jap

TEST_IMAGES = 360


def build_model(dropout: float) -> nn.Sequential:
    """Images (rows, 1, 8, 8) to logits (rows, 10), as six blocks that a pipeline can cut between."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 32, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(32, 64, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Sequential(nn.Linear(64 * 2 * 2, 64), nn.ReLU(), nn.Dropout(dropout)),
        nn.Linear(64, 10),
    )


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """The images scaled to [-1, 1], split into training and test images, the same split for everybody."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(digits.target, dtype=torch.long)
    return (
        TensorDataset(images[:-TEST_IMAGES], labels[:-TEST_IMAGES]),
        TensorDataset(images[-TEST_IMAGES:], labels[-TEST_IMAGES:]),
    )


def metrics(output: torch.Tensor, target: torch.Tensor) -> dict[str, tuple[torch.Tensor, int]]:
    """Sums over the rows of one batch, and the number of rows: ``evaluate`` returns their means."""
    return {
        "accuracy": ((output.argmax(dim=1) == target).sum(), len(target)),
        "test_loss": (nn.functional.cross_entropy(output, target, reduction="sum"), len(target)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of SGD with momentum 0.9")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="FILE", help="write the trained parameters there")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    training_data, test_data = load_data()
    loader = DataLoader(training_data, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_data, batch_size=TEST_IMAGES)

    model = build_model(args.dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    trainer = jap.prepare(model, optimizer, nn.functional.cross_entropy, microbatches=args.microbatches)

    for epoch in range(1, args.epochs + 1):
        losses = [trainer.step(images, target=labels).loss for images, labels in loader]
        for step, loss in enumerate(losses, start=(epoch - 1) * len(loader) + 1):
            print(f"step {step} loss {float(loss):.9g}")  # 9 digits tell every float32 from every other
        result = trainer.evaluate(test_loader, metrics)
        jap.report(accuracy=result["accuracy"], loss=float(losses[-1]))
        print(f"epoch {epoch} accuracy {result['accuracy']:.4f} test loss {result['test_loss']:.9g}", flush=True)

    if args.save:
        torch.save(trainer.state_dict(), args.save)


if __name__ == "__main__":
    main()
