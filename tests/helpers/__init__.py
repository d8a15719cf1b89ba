"""What several folders of tests share: the modes of FusedAdam, small training runs, comparison by bits."""
