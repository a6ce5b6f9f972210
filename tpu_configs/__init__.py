"""One YAML per machine shape, named as GKE and gcloud name it."""
