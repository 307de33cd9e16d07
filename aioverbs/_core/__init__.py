"""The compiled core: the verbs seam, the software device, domains. Private: use what `aioverbs` exports."""
