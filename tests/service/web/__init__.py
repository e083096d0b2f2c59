"""Tests of the web page, in a real browser: Debian's Chromium, driven by Playwright."""
