"""Manifests that put a pushed model on TF Serving's image, or on the embedded server's.

`config` has the settings, `render` turns them into files; `kubernetes`, `kustomize`, `kserve` and `compose` make the
objects, `server` what all of them tell the model server. `headrace manifests` is the command.
"""
