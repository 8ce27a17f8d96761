"""A model for lm-evaluation-harness: any of its tasks under any policy, with the harness's own scorers.

The harness finds no models by entry point (as of 0.4.13), so this starts it with the model registered:

    python -m kvassay.lm_eval --model kvassay \
      --model_args pretrained=smollm2-135m,policy=snapkv,budget=keep=0.25 --tasks TASK

All other arguments are the harness's own.
"""
