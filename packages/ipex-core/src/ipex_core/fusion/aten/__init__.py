# SPDX-License-Identifier: Apache-2.0
"""The graph passes of ``torch.compile(backend="ipex")``: one file per family of patterns.

**Where they run.** On the ATen graph that AOTAutograd makes, as Inductor's ``joint_custom_pre_pass``: functional,
without mutation or aliases, with composite ops decomposed, before Inductor has rewritten anything. There a model spells
an RMS norm as ``mean``, ``rsqrt`` and ``mul`` however its author wrote it, so that one matcher covers all the ways of
all releases of transformers. The other levels are worse:

* On Dynamo's graph every spelling (``x.pow(2)``, ``x ** 2``, ``torch.square``, methods, functions, in-place variants,
  ``nn.Module`` calls) would be a pattern of its own, and autocast has not been applied yet.
* After Inductor's own joint passes softmax has been rewritten by scale and parts of attentions are gone; after
  freezing, linear layers already carry oneDNN's packed weights.

**Weights.** A weight is packed by an op in the graph, ``pack_linear_weight(weight)``. Freezing turns the parameter into
a constant right after the passes, and Inductor's constant folding runs the packing once. Without freezing no weight is
packed.

**Matching** is written by hand on top of `graph` rather than with ``torch._inductor.pattern_matcher``: its traced
patterns need one registration for each combination of dtypes, masks and scales, and cannot say why a near miss was not
taken, which `ipex.explain` has to say.

A pass never changes what a graph computes, so a match only has to decide two things: whether it is *exactly* the op
(shapes, dtypes, no other user of an intermediate), and whether the op is at least as fast (`ipex_core.kernels.policy`).
"""
