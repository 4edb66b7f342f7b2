"""lm-evaluation-harness on the paged cache: ``python -m kitty_runtime.lm_eval run --model kitty ...``.

Scripts that call the harness themselves take `kitty_runtime.lm_eval.model.KittyLM`. Both need lm-eval, which the extra
``eval`` installs.
"""
