"""speculators' own reader, model, loss and checkpoint on our export. See check.py."""

import numpy as np
import torch
from check import DRAFT_VOCAB, LAYER_IDS, agreement, arguments, report, train
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.cli import create_transformer_layer_config
from speculators.train.data import ArrowDataset, CollateFn
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

TTT_STEPS = 3


def main() -> None:
    model_path, export, result = arguments()
    dataset = ArrowDataset(max_len=2048, datapath=export, on_missing="raise")
    samples = [dataset[number] for number in range(len(dataset))]
    d2t, t2d = (torch.from_numpy(np.load(export / f"{name}.npy")) for name in ("d2t", "t2d"))
    own = build_vocab_mappings_from_distribution(torch.load(export / "token_freq.pt"), DRAFT_VOCAB, len(t2d))
    model = draft_model(str(model_path), d2t, t2d)
    hidden = model.hidden_size

    @torch.no_grad()
    def choices(norm: torch.nn.Module) -> float:
        found, masks = [], []
        for sample in samples:
            logits = model.verifier_lm_head(norm(sample["verifier_last_hidden_states"].float()))
            draft = logits.argmax(-1)
            found.append(draft + d2t[draft])
            masks.append(sample["loss_mask"].bool() & t2d[sample["input_ids"]])  # the head has the draft's tokens only
        return agreement(found, [sample["input_ids"] for sample in samples], masks)

    collate = CollateFn(640, hidden, len(LAYER_IDS), torch.float32, preprocess=shift_batch)
    batch = collate(samples)
    options, _ = Eagle3DraftModel.get_trainer_kwargs(
        ttt_steps=TTT_STEPS, ttt_step_loss_decay=1.0, loss_fn="kl_div", loss_implementation="eager"
    )
    right, wrong = choices(model.verifier_norm), choices(torch.nn.Identity())
    losses = train(model.parameters(), lambda: model(**batch, **options)[1])
    model.save_pretrained(result / "drafter")
    report(
        result,
        ["speculators", "hs-connectors", "torch", "transformers", "datasets"],
        samples=len(samples),
        unreadable=batch["error_records"],
        shape=list(samples[0]["hidden_states"].shape[1:]),
        vocabulary=bool(torch.equal(own[0], d2t) and torch.equal(own[1], t2d)),
        right=right,
        wrong=wrong,
        losses=losses,
    )


def draft_model(model_path: str, d2t: torch.Tensor, t2d: torch.Tensor) -> Eagle3DraftModel:
    """One Llama layer, un-normed residual and full attention: what SGLang's drafter can be."""
    torch.manual_seed(0)
    layer = create_transformer_layer_config(model_path, 1, "llama", "silu", 2048, [0])
    return Eagle3DraftModel.from_training_args(
        layer,
        t2d=t2d,
        d2t=d2t,
        verifier_name_or_path=model_path,
        target_layer_ids=LAYER_IDS,
        draft_vocab_size=DRAFT_VOCAB,
        norm_before_residual=False,
        norm_before_fc=True,
        norm_output=True,
        ttt_steps=TTT_STEPS,
        draft_attn_impl="sdpa",
    )


if __name__ == "__main__":
    main()
