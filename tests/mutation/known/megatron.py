"""Ways in which a BERT or a ViT can be another model than it says, and defects of ``ds_terapipe prepare-data``."""

from . import Known

_BERT, _VIT = (f"tests/megatron/test_encoders.py -k 'trains_as and {kind}'" for kind in ("BERT", "ViT"))
KILLED = "tests/megatron/test_data.py -k run_that_is_killed"

KNOWN = tuple(
    Known(name, f"megatron.{module}", was, becomes, test)
    for name, module, was, becomes, test in (
        ("padding is attended to", "bert_layers", "(padding == 0)", "(padding < 0)", _BERT),
        ("all tokens are of one type", "layers", "self.tokentype_embeddings(token_types)",
         "self.tokentype_embeddings(0 * token_types)", _BERT),
        ("all tokens are at one position", "layers", "self.position_embeddings(position_ids)",
         "self.position_embeddings(0 * position_ids)", _BERT),
        ("the order of sentences is turned round", "loss", "classification_loss(order_logits, order)",
         "classification_loss(order_logits, 1 - order)", _BERT),
        ("the masked mean is over all tokens", "loss", "labels[1].float().sum().clamp(min=1.0)",
         "torch.tensor(float(labels[1].numel()))", _BERT),
        ("tokens that are not masked are predicted too", "loss", "(losses * mask.transpose(0, 1)).sum()", "losses.sum()", _BERT),
        ("the vocabulary has no bias", "bert_layers", "inputs[0] + self.bias", "inputs[0] + 0 * self.bias", _BERT),
        ("the last token is pooled", "bert_layers", "self.order(torch.tanh(self.pooler(hidden[0])))",
         "self.order(torch.tanh(self.pooler(hidden[-1])))", _BERT),
        ("bidirectional attention is causal", "attention", "is_causal=not self.is_bidirectional", "is_causal=True", _VIT),
        ("all patches are at one place", "vit_layers", "self.position_embeddings(positions)[:, None]",
         "self.position_embeddings.weight.mean(dim=0)", _VIT),
    )
) + (
    Known("documents of workers are in another order", "commands.preparing.workers", "waiting.append(", "waiting.appendleft(",
          KILLED),
    Known("workers outlive a process that is killed", "commands.preparing.workers",
          "    threading.Thread(target=_end_with_parent, daemon=True).start()\n", "", KILLED),
    Known("an old index is beside new tokens", "commands.preparing.dataset", "            os.remove(names[1])\n",
          "            pass\n", KILLED),
)  # fmt: skip
