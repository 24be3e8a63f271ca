"""A driver that is not there: a libcuda.so.1 and an nvidia-smi that say what a test wants."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

# What libcuda does with CUDA_VISIBLE_DEVICES: numbers and beginnings of UUIDs in their order, up to the first that is
# not there. FAKE_GPUS holds "name,major,minor,32 hexadecimal digits" for each, with ; between them.
_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static struct gpu { char name[64], uuid[33]; int major, minor; } all[16], shown[16];
static int count;
static int number(const char *name, int otherwise) { const char *v = getenv(name); return v ? atoi(v) : otherwise; }
static void dashed(const struct gpu *gpu, char *out) {
  const char *u = gpu->uuid;
  const char *kind = strstr(gpu->name, " MIG ") ? "MIG" : "GPU";
  sprintf(out, "%s-%.8s-%.4s-%.4s-%.4s-%.12s", kind, u, u + 8, u + 12, u + 16, u + 20);
}
int cuDriverGetVersion(int *version) { *version = number("FAKE_VERSION", 13000); return 0; }
int cuInit(unsigned flags) {
  (void)flags;
  if (getenv("FAKE_HANG")) sleep(600);
  if (getenv("FAKE_CRASH")) abort();
  if (number("FAKE_INIT", 0)) return number("FAKE_INIT", 0);
  const char *given = getenv("FAKE_GPUS"), *visible = getenv("CUDA_VISIBLE_DEVICES");
  char text[2048]; int have = 0;
  snprintf(text, sizeof text, "%s", given ? given : "");
  for (char *part = strtok(text, ";"); part && have < 16; part = strtok(0, ";"))
    have += sscanf(part, "%63[^,],%d,%d,%32s", all[have].name, &all[have].major, &all[have].minor, all[have].uuid) == 4;
  count = 0;
  if (!visible) { for (; count < have; count++) shown[count] = all[count]; }
  else {
    snprintf(text, sizeof text, "%s", visible);
    for (char *part = strtok(text, ","); part; part = strtok(0, ",")) {
      int found = -1; char name[64];
      for (int i = 0; i < have; i++) {
        dashed(&all[i], name);
        int is_number = part[0] >= '0' && part[0] <= '9';
        int is_name = strlen(part) > 4 && !strncmp(name, part, strlen(part));
        if (is_number ? atoi(part) == i : is_name) found = i;
      }
      if (found < 0) break;
      shown[count++] = all[found];
    }
  }
  return count ? 0 : 100;
}
int cuDeviceGetCount(int *out) { *out = count; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "%s", shown[device].name); return 0; }
int cuDeviceGetAttribute(int *out, int attribute, int device) {
  *out = attribute == 75 ? shown[device].major : shown[device].minor; return 0;
}
int cuDeviceGetUuid_v2(unsigned char *out, int device) {
  for (int i = 0; i < 16; i++) { unsigned byte; sscanf(shown[device].uuid + 2 * i, "%2x", &byte); out[i] = byte; }
  return 0;
}
"""

H200 = "NVIDIA H200,9,0,11111111222233334444555555555555"
V100 = "Tesla V100,7,0,aaaaaaaabbbbccccddddeeeeeeeeeeee"
MIG = "NVIDIA H200 MIG 1g.18gb,9,0,99999999888877776666555555555555"


def library(folder: Path) -> dict[str, str]:
    """Builds the library in a folder. Returns the variables that make a process take it."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "fake_cuda.c"
    source.write_text(_SOURCE)
    compiler = os.environ.get("CC", "cc").split()
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    return {"LD_LIBRARY_PATH": str(folder)}


def smi(folder: Path, script: str) -> dict[str, str]:
    """An nvidia-smi that runs a shell script. Returns the variable that makes a process take it."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}
