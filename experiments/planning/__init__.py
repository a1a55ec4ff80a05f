"""The models of `async_rlhf/plan` held against what was published and what is measured."""
