/* A libnvidia-ml.so.1 without a GPU, for tests and benchmarks.
 *
 * Answers come from a product profile (figures measured on an H200, driver 580.159) and from the text file named by
 * NVML_STUB_CONFIG, which is read again whenever it is replaced. See __init__.py for the lines it understands.
 */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, UNSUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, SMALL = 7, TIMEOUT = 10, MISMATCH = 25 };
enum { MAX_DEV = 64, MAX_LINES = 4096, MAX_MIG = 8 };
#define ANY (-1000000)
#define ALL_SCOPES 0xFFFFFFFFu
#define NA32 0xFFFFFFFFu
#define NA64 0xFFFFFFFFFFFFFFFFull

typedef struct {
  const char *key, *name;
  uint64_t total, reserved;
  unsigned bus, mem_clock, sm_clock, links, link_mbps, gpm, unified, mig, nvlink5, cc;
} Profile;

static const Profile PROFILES[] = {
    {"h200", "NVIDIA H200", 150754820096ull, 644939776ull, 6016, 3201, 1980, 18, 26562, 1, 0, 0, 0, 90},
    {"b200", "NVIDIA B200", 192265846784ull, 644939776ull, 8192, 3996, 1965, 18, 53125, 1, 0, 0, 1, 100},
    {"a100", "NVIDIA A100-SXM4-80GB", 85899345920ull, 628424704ull, 5120, 1593, 1410, 12, 25000, 0, 0, 0, 0, 80},
    {"ada", "NVIDIA L40S", 48305799168ull, 553648128ull, 384, 9001, 2520, 0, 0, 0, 0, 0, 0, 89},
    {"gb10", "NVIDIA GB10", 0, 0, 0, 0, 2418, 0, 0, 0, 1, 0, 0, 121},
    {"mig", "NVIDIA H200", 150754820096ull, 644939776ull, 6016, 3201, 1980, 18, 26562, 1, 0, 1, 0, 90},
};

typedef struct Dev Dev;
typedef struct { Dev *dev; int slot; } Mig;
struct Dev { int index; Mig mig[MAX_MIG]; };
static Dev devs[MAX_DEV];

typedef struct { char word[12][96]; int n; } Line;
static Line *lines;
static int n_lines, n_devices = 1;
static const Profile *profile = &PROFILES[0];
static char driver_version[96] = "580.159.04";
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct timespec seen_mtime;
static ino_t seen_ino;
static uint64_t next_check_ns, start_ns;
static long delivered;
static double cost_factor; /* 0 none, 1 as measured on an idle H200, 2 under HBM load */

static uint64_t now_ns(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

static uint64_t wall_us(void) {
  struct timespec ts;
  clock_gettime(CLOCK_REALTIME, &ts);
  return (uint64_t)ts.tv_sec * 1000000ull + (uint64_t)ts.tv_nsec / 1000;
}

static int split(char *text, Line *line) {
  char *save = NULL;
  line->n = 0;
  for (char *w = strtok_r(text, " \t\r\n", &save); w && line->n < 12; w = strtok_r(NULL, " \t\r\n", &save))
    snprintf(line->word[line->n++], sizeof line->word[0], "%s", w);
  return line->n > 0 && line->word[0][0] != '#';
}

static void parse(FILE *file) {
  static char text[4096];
  n_lines = 0;
  cost_factor = 0;
  while (n_lines < MAX_LINES && fgets(text, sizeof text, file)) {
    Line *line = &lines[n_lines];
    if (!split(text, line)) continue;
    if (!strcmp(line->word[0], "devices")) n_devices = atoi(line->word[1]);
    if (!strcmp(line->word[0], "driver")) snprintf(driver_version, sizeof driver_version, "%s", line->word[1]);
    if (!strcmp(line->word[0], "profile"))
      for (unsigned i = 0; i < sizeof PROFILES / sizeof *PROFILES; i++)
        if (!strcmp(line->word[1], PROFILES[i].key)) profile = &PROFILES[i];
    if (!strcmp(line->word[0], "costs"))
      cost_factor = !strcmp(line->word[1], "real") ? 1 : !strcmp(line->word[1], "load") ? 2 : 0;
    n_lines++;
  }
  if (n_devices > MAX_DEV) n_devices = MAX_DEV;
}

/* Called with the lock held. */
static void reload(void) {
  const char *path = getenv("NVML_STUB_CONFIG");
  uint64_t now = now_ns();
  struct stat st;
  if (now < next_check_ns) return;
  next_check_ns = now + 2000000;
  if (!lines) {
    lines = calloc(MAX_LINES, sizeof *lines);
    start_ns = now;
    for (int i = 0; i < MAX_DEV; i++) {
      devs[i].index = i;
      for (int m = 0; m < MAX_MIG; m++) devs[i].mig[m] = (Mig){&devs[i], m};
    }
  }
  if (!path || stat(path, &st)) return;
  if (st.st_ino == seen_ino && !memcmp(&st.st_mtim, &seen_mtime, sizeof seen_mtime)) return;
  FILE *file = fopen(path, "r");
  if (!file) return;
  seen_ino = st.st_ino;
  seen_mtime = st.st_mtim;
  parse(file);
  fclose(file);
}

static int same_dev(const char *word, int dev) { return !strcmp(word, "*") || atoi(word) == dev; }

static Line *fault_line(const char *call, int dev) {
  for (int i = 0; i < n_lines; i++) {
    Line *l = &lines[i];
    if (l->n < 4 || strcmp(l->word[0], "fault")) continue;
    if (strcmp(l->word[1], "*") && strcmp(l->word[1], call)) continue;
    if (!strcmp(l->word[1], "*") && dev < 0) continue;
    if (same_dev(l->word[2], dev)) return l;
  }
  return NULL;
}

enum { PLAIN = 0, SENTINEL = 1, NOT_A_NUMBER = 2 };

/* Applies the faults of one call: its return code, and in *how what becomes of its values. */
static int enter(const char *call, int dev, int *how) {
  *how = PLAIN;
  for (;;) {
    int rc = OK, hang = 0;
    long delay = 0;
    pthread_mutex_lock(&lock);
    reload();
    Line *l = fault_line(call, dev);
    if (l) {
      const char *kind = l->word[3];
      long arg = l->n > 4 ? strtol(l->word[4], NULL, 0) : 0;
      if (!strcmp(kind, "return")) rc = (int)arg;
      if (!strcmp(kind, "hang")) hang = 1;
      if (!strcmp(kind, "delay")) delay = arg;
      if (!strcmp(kind, "sentinel")) *how = SENTINEL;
      if (!strcmp(kind, "nan")) *how = NOT_A_NUMBER;
    }
    if (rc == OK && dev >= n_devices) rc = 15;
    pthread_mutex_unlock(&lock);
    if (delay) usleep((useconds_t)delay);
    if (!hang) return rc;
    usleep(10000);
  }
}

/* One line per call in the file named by NVML_STUB_LOG; with the lock held. */
static FILE *call_log(void) {
  static FILE *file;
  static int tried;
  const char *path = tried ? NULL : getenv("NVML_STUB_LOG");
  tried = 1;
  if (path && (file = fopen(path, "a"))) setvbuf(file, NULL, _IOLBF, 0);
  return file;
}
static void log_call(const char *call, int dev) {
  pthread_mutex_lock(&lock);
  FILE *file = call_log();
  if (file && strcmp(call, "nvmlDeviceGetFieldValues") && strcmp(call, "nvmlEventSetWait_v2")) fprintf(file, "%s %d\n", call, dev);
  pthread_mutex_unlock(&lock);
}
/* Time in the driver is CPU time, as measured: the call does not sleep. */
static void spin_us(double us) {
  uint64_t end = now_ns() + (uint64_t)(us * 1000 * cost_factor);
  while (now_ns() < end) {}
}

#define ENTER(dev) int how = PLAIN, rc_ = (log_call(__func__, dev), enter(__func__, dev, &how)); if (rc_) return rc_; (void)how

static double setting(int dev, const char *key, double otherwise) {
  double value = otherwise;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < n_lines; i++)
    if (lines[i].n >= 4 && !strcmp(lines[i].word[0], "set") && same_dev(lines[i].word[1], dev) &&
        !strcmp(lines[i].word[2], key))
      value = strtod(lines[i].word[3], NULL);
  pthread_mutex_unlock(&lock);
  return value;
}

static int give32(unsigned *out, int how, double value) {
  *out = how == SENTINEL ? NA32 : (unsigned)(int64_t)value;
  return OK;
}

static int give64(uint64_t *out, int how, double value) {
  *out = how == SENTINEL ? NA64 : (uint64_t)value;
  return OK;
}

/* A MIG handle lies inside its Dev's mig array: tell the two apart by address. */
static int is_mig(const void *h) { return h != NULL && ((const char *)h - (const char *)devs) % (long)sizeof(Dev) != 0; }
static int index_of(const void *h) { return h == NULL ? -1 : (int)(((const char *)h - (const char *)devs) / (long)sizeof(Dev)); }

/* ---- library ---- */
int nvmlInitWithFlags(unsigned flags) { (void)flags; ENTER(-1); return OK; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { ENTER(-1); return OK; }
const char *nvmlErrorString(int rc) { (void)rc; return "stub error"; }
static int text_out(char *out, unsigned size, const char *text) {
  if (strlen(text) + 1 > size) return SMALL;
  strcpy(out, text);
  return OK;
}
int nvmlSystemGetDriverVersion(char *out, unsigned size) { ENTER(-1); return text_out(out, size, driver_version); }
int nvmlSystemGetNVMLVersion(char *out, unsigned size) {
  char text[112];
  ENTER(-1);
  snprintf(text, sizeof text, "13.%s", driver_version);
  return text_out(out, size, text);
}
int nvmlSystemGetCudaDriverVersion(int *out) { ENTER(-1); *out = 13000; return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { return nvmlSystemGetCudaDriverVersion(out); }
int nvmlDeviceGetCount_v2(unsigned *out) { ENTER(-1); *out = (unsigned)n_devices; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Dev **out) {
  ENTER((int)index);
  *out = &devs[index];
  return OK;
}

/* ---- identity ---- */
static void uuid_of(const void *h, char *out, unsigned size) {
  int dev = index_of(h);
  if (is_mig(h)) snprintf(out, size, "MIG-%08x-0000-4000-8000-%012x", dev, ((const Mig *)h)->slot);
  else snprintf(out, size, "GPU-%08x-0000-4000-8000-%012x", dev, dev);
}
int nvmlDeviceGetName(void *h, char *out, unsigned size) {
  ENTER(index_of(h));
  char text[96];
  snprintf(text, sizeof text, "%s%s", profile->name, is_mig(h) ? " MIG 3g.71gb" : "");
  return text_out(out, size, text);
}
int nvmlDeviceGetUUID(void *h, char *out, unsigned size) {
  char text[96];
  ENTER(index_of(h));
  uuid_of(h, text, sizeof text);
  return text_out(out, size, text);
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
  char text[96];
  for (int i = 0; i < n_devices; i++) {
    uuid_of(&devs[i], text, sizeof text);
    if (!strcmp(text, uuid)) { *out = &devs[i]; return OK; }
  }
  return NOT_FOUND;
}
int nvmlDeviceGetIndex(void *h, unsigned *out) { ENTER(index_of(h)); *out = (unsigned)index_of(h); return OK; }
int nvmlDeviceGetSerial(void *h, char *out, unsigned size) { ENTER(index_of(h)); return text_out(out, size, "0000000000"); }
typedef struct {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char bus_id[32];
} PciInfo;
int nvmlDeviceGetPciInfo_v3(void *h, PciInfo *out) {
  ENTER(index_of(h));
  unsigned bus = 0x10u + (unsigned)index_of(h);
  memset(out, 0, sizeof *out);
  out->bus = bus;
  out->id = 0x233510deu;
  snprintf(out->legacy, sizeof out->legacy, "0000:%02X:00.0", bus);
  snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", bus);
  return OK;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **out) {
  unsigned domain, bus;
  if (sscanf(id, "%x:%x", &domain, &bus) != 2 || bus < 0x10 || bus - 0x10 >= (unsigned)n_devices) return NOT_FOUND;
  *out = &devs[bus - 0x10];
  return OK;
}
int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) {
  ENTER(index_of(h));
  *major = (int)profile->cc / 10;
  *minor = (int)profile->cc % 10;
  return OK;
}

/* ---- memory ---- */
typedef struct { uint64_t total, free, used; } Memory;
typedef struct { unsigned version; uint64_t total, reserved, free, used; } MemoryV2;
static Line *mig_line(int dev, int slot);
static int memory(const void *h, MemoryV2 *out, int how) {
  int dev = index_of(h);
  uint64_t total = profile->total, reserved = profile->reserved, used = 2970419200ull;
  if (profile->unified && setting(dev, "zero_total", 0) == 0) return UNSUPPORTED;
  if (is_mig(h)) {
    Line *l = mig_line(dev, ((const Mig *)h)->slot);
    if (!l) return NOT_FOUND;
    total = strtoull(l->word[4], NULL, 0);
    used = strtoull(l->word[5], NULL, 0);
    reserved = 0;
  } else {
    total = (uint64_t)setting(dev, "mem_total", (double)total);
    used = (uint64_t)setting(dev, "mem_used", (double)used);
  }
  if (profile->unified) total = reserved = used = 0;
  *out = (MemoryV2){0x02000028u, total, reserved, total - reserved - used, used};
  if (how == SENTINEL) out->total = out->reserved = out->free = out->used = NA64;
  return OK;
}
int nvmlDeviceGetMemoryInfo_v2(void *h, MemoryV2 *out) {
  ENTER(index_of(h));
  return out->version == 0x02000028u ? memory(h, out, how) : MISMATCH;
}
int nvmlDeviceGetMemoryInfo(void *h, Memory *out) {
  MemoryV2 v2;
  ENTER(index_of(h));
  int rc = memory(h, &v2, how);
  if (rc == OK) *out = (Memory){v2.total, v2.free, how ? NA64 : v2.used + v2.reserved};
  return rc;
}
int nvmlDeviceGetBAR1MemoryInfo(void *h, uint64_t out[3]) {
  ENTER(index_of(h));
  out[0] = 274877906944ull; out[1] = 274876858368ull; out[2] = 1048576;
  return OK;
}
int nvmlDeviceGetMemoryBusWidth(void *h, unsigned *out) {
  ENTER(index_of(h));
  if (!profile->bus) return UNSUPPORTED;
  return give32(out, how, setting(index_of(h), "bus_width", profile->bus));
}

/* ---- simple values ---- */
typedef struct { unsigned gpu, memory; } Utilization;
int nvmlDeviceGetUtilizationRates(void *h, Utilization *out) {
  ENTER(index_of(h));
  if (setting(index_of(h), "mig", profile->mig) != 0) return UNSUPPORTED;
  give32(&out->gpu, how, setting(index_of(h), "gpu_busy", 97));
  return give32(&out->memory, how, setting(index_of(h), "mem_busy", 55));
}
int nvmlDeviceGetClockInfo(void *h, unsigned type, unsigned *out) {
  ENTER(index_of(h));
  if (type == 2 && !profile->mem_clock) return UNSUPPORTED;
  if (type == 2) return give32(out, how, setting(index_of(h), "mem_clock", profile->mem_clock));
  return give32(out, how, setting(index_of(h), "sm_clock", profile->sm_clock));
}
int nvmlDeviceGetMaxClockInfo(void *h, unsigned type, unsigned *out) {
  ENTER(index_of(h));
  if (type == 2 && !profile->mem_clock) return UNSUPPORTED;
  return give32(out, how, type == 2 ? profile->mem_clock : profile->sm_clock);
}
int nvmlDeviceGetPowerUsage(void *h, unsigned *out) {
  ENTER(index_of(h));
  return give32(out, how, setting(index_of(h), "power", 612345));
}
int nvmlDeviceGetPowerManagementLimit(void *h, unsigned *out) {
  ENTER(index_of(h));
  return give32(out, how, setting(index_of(h), "power_limit", 700000));
}
int nvmlDeviceGetEnforcedPowerLimit(void *h, unsigned *out) {
  ENTER(index_of(h));
  return give32(out, how, setting(index_of(h), "power_limit", 700000));
}
int nvmlDeviceGetTemperature(void *h, unsigned sensor, unsigned *out) {
  (void)sensor;
  ENTER(index_of(h));
  return give32(out, how, setting(index_of(h), "temp", 63));
}
typedef struct { unsigned version, sensor; int value; } TemperatureV;
int nvmlDeviceGetTemperatureV(void *h, TemperatureV *out) {
  ENTER(index_of(h));
  out->value = how == SENTINEL ? -1 : (int)setting(index_of(h), "temp", 63);
  return OK;
}
int nvmlDeviceGetCurrentClocksEventReasons(void *h, uint64_t *out) {
  ENTER(index_of(h));
  return give64(out, how, setting(index_of(h), "mask", 0));
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *h, uint64_t *out) {
  ENTER(index_of(h));
  return give64(out, how, setting(index_of(h), "mask", 0));
}
int nvmlDeviceGetTotalEccErrors(void *h, unsigned type, unsigned counter, uint64_t *out) {
  (void)counter;
  ENTER(index_of(h));
  if (profile->unified) return UNSUPPORTED;
  return give64(out, how, setting(index_of(h), type ? "ecc_uncorrected" : "ecc_corrected", 0));
}
int nvmlDeviceGetPcieReplayCounter(void *h, unsigned *out) {
  ENTER(index_of(h));
  return give32(out, how, setting(index_of(h), "pcie_replays", 0));
}
int nvmlDeviceGetRemappedRows(void *h, unsigned *c, unsigned *u, unsigned *pending, unsigned *failed) {
  ENTER(index_of(h));
  if (profile->unified) return UNSUPPORTED;
  give32(c, how, setting(index_of(h), "remapped_c", 0));
  give32(u, how, setting(index_of(h), "remapped_u", 0));
  give32(pending, how, setting(index_of(h), "remap_pending", 0));
  return give32(failed, how, setting(index_of(h), "remap_failed", 0));
}

/* ---- what only other monitors ask ---- */
int nvmlDeviceGetPcieThroughput(void *h, unsigned counter, unsigned *out) {
  (void)counter;
  ENTER(index_of(h));
  usleep(20000);
  return give32(out, how, 17423);
}
int nvmlDeviceGetFanSpeed(void *h, unsigned *out) { (void)out; ENTER(index_of(h)); return UNSUPPORTED; }
int nvmlDeviceGetPerformanceState(void *h, unsigned *out) { ENTER(index_of(h)); *out = 0; return OK; }
int nvmlDeviceGetPersistenceMode(void *h, unsigned *out) { ENTER(index_of(h)); *out = 1; return OK; }
int nvmlDeviceGetComputeMode(void *h, unsigned *out) { ENTER(index_of(h)); *out = 0; return OK; }
int nvmlDeviceGetDisplayActive(void *h, unsigned *out) { ENTER(index_of(h)); *out = 0; return OK; }
int nvmlDeviceGetDisplayMode(void *h, unsigned *out) { ENTER(index_of(h)); *out = 0; return OK; }
int nvmlDeviceGetDriverModel(void *h, unsigned *a, unsigned *b) { (void)a; (void)b; ENTER(index_of(h)); return UNSUPPORTED; }
int nvmlDeviceGetDriverModel_v2(void *h, unsigned *a, unsigned *b) { (void)a; (void)b; ENTER(index_of(h)); return UNSUPPORTED; }
int nvmlDeviceGetEncoderUtilization(void *h, unsigned *out, unsigned *us) { ENTER(index_of(h)); *out = 0; *us = 100000; return OK; }
int nvmlDeviceGetDecoderUtilization(void *h, unsigned *out, unsigned *us) { ENTER(index_of(h)); *out = 0; *us = 100000; return OK; }
int nvmlDeviceGetConfComputeMemSizeInfo(void *h, void *out) { (void)out; ENTER(index_of(h)); return UNSUPPORTED; }
int nvmlDeviceGetRunningProcessDetailList(void *h, void *out) { (void)out; ENTER(index_of(h)); return UNSUPPORTED; }

/* ---- processes ---- */
typedef struct { unsigned pid; uint64_t used; unsigned gi, ci; } Process;
static int processes(int dev, char kind, unsigned *count, Process *out, int how) {
  unsigned n = 0, room = out ? *count : 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < n_lines; i++) {
    Line *l = &lines[i];
    if (l->n < 6 || strcmp(l->word[0], "proc") || !same_dev(l->word[1], dev) || l->word[5][0] != kind) continue;
    if (n < room) {
      unsigned gi = l->n > 6 ? (unsigned)atoi(l->word[6]) : NA32;
      out[n] = (Process){(unsigned)atol(l->word[2]), how == SENTINEL ? NA64 : strtoull(l->word[3], NULL, 0), gi, NA32};
    }
    n++;
  }
  pthread_mutex_unlock(&lock);
  *count = n;
  return n > room ? SMALL : OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *count, Process *out) {
  ENTER(index_of(h));
  return processes(index_of(h), 'c', count, out, how);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *h, unsigned *count, Process *out) {
  ENTER(index_of(h));
  return processes(index_of(h), 'g', count, out, how);
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *h, unsigned *count, Process *out) {
  ENTER(index_of(h));
  (void)out;
  *count = 0;
  return OK;
}
typedef struct { unsigned pid; uint64_t at; unsigned sm, mem, enc, dec; } ProcessSample;
int nvmlDeviceGetProcessUtilization(void *h, ProcessSample *out, unsigned *count, uint64_t since) {
  (void)since;
  ENTER(index_of(h));
  unsigned n = 0, room = out ? *count : 0;
  if (setting(index_of(h), "mig", profile->mig) != 0) return UNSUPPORTED;
  if (out) spin_us(2500); /* pynvml asks for the count first */
  pthread_mutex_lock(&lock);
  for (int i = 0; i < n_lines; i++) {
    Line *l = &lines[i];
    int proc = !strcmp(l->word[0], "proc") && l->n >= 6, stray = !strcmp(l->word[0], "sample") && l->n >= 4;
    if (!(proc || stray) || !same_dev(l->word[1], index_of(h))) continue;
    unsigned sm = (unsigned)strtoul(l->word[proc ? 4 : 3], NULL, 0);
    if (n < room) out[n] = (ProcessSample){(unsigned)atol(l->word[2]), wall_us(), sm, 0, 0, 0};
    n++;
  }
  pthread_mutex_unlock(&lock);
  *count = n;
  if (n == 0) return NOT_FOUND;
  return n > room ? SMALL : OK;
}

/* ---- field values ---- */
typedef union { double d; unsigned u; uint64_t ull; } Value;
typedef struct { unsigned id, scope; int64_t at_us, latency_us; unsigned type, rc; Value value; } FieldValue;

static double field_default(int dev, unsigned id, unsigned scope, unsigned *rc, unsigned *type) {
  int per_link = (id >= 138 && id <= 141) || (id >= 161 && id <= 166) || id == 208 || id == 215 || id == 295;
  *rc = OK;
  *type = 3;
  if (per_link && (profile->links == 0 || (scope >= profile->links && scope != ALL_SCOPES))) *rc = INVALID;
  if (id >= 164 && id <= 166 && scope == ALL_SCOPES) *rc = UNSUPPORTED;
  switch (id) {
  case 74: case 76: case 269: case 270: case 271: return 0;
  case 82: *type = 1; if (profile->unified) *rc = UNSUPPORTED; return setting(dev, "mem_temp", 71);
  case 91: *type = 1; if (!profile->links) *rc = UNSUPPORTED; return profile->links;
  case 138: case 139: case 140: case 141: return 0;
  case 161: case 162: case 163: if (profile->nvlink5) *rc = UNSUPPORTED; return 0;
  case 208: case 215: case 295: if (!profile->nvlink5) *rc = UNSUPPORTED; return 0;
  case 164: *type = 1; return profile->link_mbps;
  case 165: *type = 1; return 1;
  case 166: *type = 1; return 6;
  case 197: case 198: if (profile->unified) *rc = UNSUPPORTED; return 0;
  default: *rc = UNSUPPORTED; return 0;
  }
}
static int is_counter(unsigned id) { return (id >= 138 && id <= 141) || (id >= 161 && id <= 163) || id == 208 || id == 215 || id == 295; }
static void one_field(int dev, FieldValue *f, int how);
/* Sum over the links; how an NVLink 5 part answers is not known, so it does not. */
static double sum_of_links(int dev, unsigned id, unsigned *rc) {
  double sum = 0;
  *rc = profile->links ? UNSUPPORTED : INVALID;
  for (unsigned link = 0; link < profile->links && !profile->nvlink5; link++) {
    FieldValue part = {.id = id, .scope = link};
    one_field(dev, &part, PLAIN);
    if (part.rc != OK) continue;
    sum += (double)part.value.ull;
    *rc = OK;
  }
  return sum;
}
/* Microseconds of one entry on an idle H200 with 18 links, driver 580.159. */
static double field_cost_us(const FieldValue *f) {
  if (f->id == 270 || f->id == 271) return 870;
  if (is_counter(f->id)) return f->scope == ALL_SCOPES ? 550 : 1000;
  if (f->id == 167) return 180;
  return f->id == 164 || f->id == 165 ? 11 : 1;
}
static void one_field(int dev, FieldValue *f, int how) {
  unsigned rc, type;
  double value = field_default(dev, f->id, f->scope, &rc, &type), rate = 0;
  if (is_counter(f->id) && f->scope == ALL_SCOPES) value = sum_of_links(dev, f->id, &rc);
  pthread_mutex_lock(&lock);
  for (int i = 0; i < n_lines; i++) {
    Line *l = &lines[i];
    if (l->n < 5 || strcmp(l->word[0], "field") || !same_dev(l->word[1], dev)) continue;
    if ((unsigned)atoi(l->word[2]) != f->id || (strcmp(l->word[3], "*") && (unsigned)atoi(l->word[3]) != f->scope)) continue;
    value = strtod(l->word[4], NULL);
    if (l->n > 5) rc = (unsigned)atoi(l->word[5]);
    if (l->n > 6) type = (unsigned)atoi(l->word[6]);
    if (l->n > 7) rate = strtod(l->word[7], NULL);
  }
  pthread_mutex_unlock(&lock);
  value += rate * (double)(now_ns() - start_ns) / 1e9;
  f->at_us = (int64_t)wall_us();
  f->latency_us = 1;
  f->type = type;
  f->rc = rc;
  f->value.ull = 0;
  if (rc != OK) return;
  if (how == NOT_A_NUMBER) { f->type = 0; f->value.d = NAN; return; }
  if (type == 0) f->value.d = value;
  else if (type == 1) give32(&f->value.u, how, value);
  else give64(&f->value.ull, how, value);
}
int nvmlDeviceGetFieldValues(void *h, int count, FieldValue *values) {
  ENTER(index_of(h));
  double cost_us = 0;
  pthread_mutex_lock(&lock);
  FILE *file = call_log();
  if (file) {
    fprintf(file, "nvmlDeviceGetFieldValues %d", index_of(h));
    for (int i = 0; i < count; i++) fprintf(file, " %u:%u", values[i].id, values[i].scope);
    fprintf(file, "\n");
  }
  pthread_mutex_unlock(&lock);
  for (int i = 0; i < count; i++) {
    one_field(index_of(h), &values[i], how);
    cost_us += field_cost_us(&values[i]);
  }
  spin_us(cost_us);
  return OK;
}

/* ---- GPM ---- */
typedef struct { uint64_t at_ns; int dev, gi; } Sample;
typedef struct { unsigned id, rc; double value; const char *text[3]; } Metric;
typedef struct { unsigned version, n; Sample *first, *second; Metric metrics[]; } MetricsGet;

int nvmlGpmQueryDeviceSupport(void *h, unsigned out[2]) {
  ENTER(index_of(h));
  out[1] = setting(index_of(h), "gpm", profile->gpm) != 0;
  return OK;
}
int nvmlGpmQueryIfStreamingEnabled(void *h, unsigned *out) { ENTER(index_of(h)); *out = 1; return OK; }
int nvmlGpmSampleAlloc(Sample **out) { ENTER(-1); *out = calloc(1, sizeof **out); return OK; }
int nvmlGpmSampleFree(Sample *sample) { ENTER(-1); free(sample); return OK; }
int nvmlGpmSampleGet(void *h, Sample *sample) {
  ENTER(index_of(h));
  if (setting(index_of(h), "gpm", profile->gpm) == 0) return UNSUPPORTED;
  *sample = (Sample){now_ns(), index_of(h), -1};
  return OK;
}
int nvmlGpmMigSampleGet(void *h, unsigned gi, Sample *sample) {
  ENTER(index_of(h));
  *sample = (Sample){now_ns(), index_of(h), (int)gi};
  return OK;
}
static double gpm_default(unsigned id, unsigned *rc) {
  unsigned links = profile->links, top = links < 18 ? links : 18;
  *rc = OK;
  switch (id) {
  case 1: return 97;
  case 2: return 84;
  case 3: return 38;
  case 5: return 25;
  case 10: return 41.5;
  case 20: return 200;
  case 21: return 2700;
  case 60: return 10.0 * links + links * (links - 1) / 2.0;
  case 61: return 5280.0 * links + links * (links - 1) / 2.0;
  }
  if (id >= 62 && id < 62 + 2 * top) return (id % 2 ? 5280 : 10) + (id - 62) / 2;
  if (id >= 4 && id <= 13) return 1;
  if (id >= 160 && id <= 165) return 0;
  *rc = UNSUPPORTED;
  return 0;
}
static void one_metric(const Sample *s, Metric *m, double dt_s, int how) {
  unsigned rc;
  double value = gpm_default(m->id, &rc);
  pthread_mutex_lock(&lock);
  for (int i = 0; i < n_lines; i++) {
    Line *l = &lines[i];
    if (l->n < 4 || strcmp(l->word[0], "gpm") || !same_dev(l->word[1], s->dev)) continue;
    if ((unsigned)atoi(l->word[2]) != m->id || (l->n > 5 && atoi(l->word[5]) != s->gi)) continue;
    value = strtod(l->word[3], NULL);
    rc = l->n > 4 ? (unsigned)atoi(l->word[4]) : OK;
  }
  pthread_mutex_unlock(&lock);
  if (dt_s < 0.1) value = m->id == 10 ? NAN : 0; /* as measured with 20 ms on an H200 */
  m->rc = rc;
  m->value = how == NOT_A_NUMBER ? NAN : how == SENTINEL ? 4294967295.0 : value;
}
int nvmlGpmMetricsGet(MetricsGet *get) {
  if (get->version != 1) return MISMATCH;
  if (!get->first || !get->second) return INVALID;
  ENTER(get->second->dev);
  if (get->first->dev != get->second->dev || get->first->gi != get->second->gi) return INVALID;
  double dt_s = (double)(get->second->at_ns - get->first->at_ns) / 1e9;
  for (unsigned i = 0; i < get->n; i++) one_metric(get->second, &get->metrics[i], dt_s, how);
  return OK;
}

/* ---- MIG ---- */
static Line *mig_line(int dev, int slot) {
  static Line standard[2] = {{{"mig", "*", "1", "0", "74000000000", "1000000000"}, 6}, {{"mig", "*", "2", "0", "74000000000", "2000000000"}, 6}};
  Line *found = NULL;
  int n = 0, any = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < n_lines; i++)
    if (lines[i].n >= 6 && !strcmp(lines[i].word[0], "mig") && same_dev(lines[i].word[1], dev)) {
      any = 1;
      if (n++ == slot) found = &lines[i];
    }
  pthread_mutex_unlock(&lock);
  return any ? found : slot < 2 ? &standard[slot] : NULL;
}
int nvmlDeviceGetMigMode(void *h, unsigned *current, unsigned *pending) {
  ENTER(index_of(h));
  if (profile->cc < 80 || profile->unified) return UNSUPPORTED;
  *current = *pending = (unsigned)setting(index_of(h), "mig", profile->mig);
  return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *out) { ENTER(index_of(h)); *out = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned slot, void **out) {
  ENTER(index_of(h));
  if (slot >= MAX_MIG || setting(index_of(h), "mig", profile->mig) == 0 || !mig_line(index_of(h), (int)slot)) return NOT_FOUND;
  *out = &devs[index_of(h)].mig[slot];
  return OK;
}
int nvmlDeviceGetGpuInstanceId(void *h, unsigned *out) {
  ENTER(index_of(h));
  Line *l = is_mig(h) ? mig_line(index_of(h), ((Mig *)h)->slot) : NULL;
  if (!l) return NOT_FOUND;
  *out = (unsigned)atoi(l->word[2]);
  return OK;
}
int nvmlDeviceGetComputeInstanceId(void *h, unsigned *out) {
  ENTER(index_of(h));
  Line *l = is_mig(h) ? mig_line(index_of(h), ((Mig *)h)->slot) : NULL;
  if (!l) return NOT_FOUND;
  *out = (unsigned)atoi(l->word[3]);
  return OK;
}
int nvmlDeviceIsMigDeviceHandle(void *h, unsigned *out) { ENTER(index_of(h)); *out = (unsigned)is_mig(h); return OK; }
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *h, void **out) { *out = &devs[index_of(h)]; return OK; }

/* ---- events ---- */
typedef struct { void *device; uint64_t type, value; unsigned gi, ci; } Event;
typedef struct { uint64_t mask[MAX_DEV]; } EventSet;
static double event_mask(int dev) { return setting(dev, "event_mask", profile->unified ? 0 : 0xff9f); }
int nvmlDeviceGetSupportedEventTypes(void *h, uint64_t *out) {
  ENTER(index_of(h));
  *out = (uint64_t)event_mask(index_of(h));
  return OK;
}
int nvmlEventSetCreate(EventSet **out) { ENTER(-1); *out = calloc(1, sizeof **out); return OK; }
int nvmlEventSetFree(EventSet *set) { ENTER(-1); free(set); return OK; }
int nvmlDeviceRegisterEvents(void *h, uint64_t mask, EventSet *set) {
  ENTER(index_of(h));
  if (mask & ~(uint64_t)event_mask(index_of(h))) return UNSUPPORTED;
  if (cost_factor > 0) usleep(700000); /* 460-980 ms measured */
  set->mask[index_of(h)] |= mask;
  return OK;
}
static int next_event(EventSet *set, Event *out) {
  for (int i = 0; i < n_lines; i++) {
    Line *l = &lines[i];
    if (l->n < 5 || strcmp(l->word[0], "event") || atol(l->word[1]) <= delivered) continue;
    delivered = atol(l->word[1]);
    int dev = atoi(l->word[2]);
    uint64_t type = strtoull(l->word[3], NULL, 0);
    if (dev >= n_devices || !(set->mask[dev] & type)) continue;
    unsigned gi = l->n > 5 ? (unsigned)atol(l->word[5]) : NA32;
    *out = (Event){&devs[dev], type, strtoull(l->word[4], NULL, 0), gi, NA32};
    return 1;
  }
  return 0;
}
int nvmlEventSetWait_v2(EventSet *set, Event *out, unsigned timeout_ms) {
  /* NVML may return early; tests make it so to end sooner. */
  const char *cap = getenv("NVML_STUB_WAIT_MS");
  if (cap && (unsigned)atoi(cap) < timeout_ms) timeout_ms = (unsigned)atoi(cap);
  uint64_t deadline = now_ns() + timeout_ms * 1000000ull;
  for (;;) {
    ENTER(-1);
    pthread_mutex_lock(&lock);
    int found = next_event(set, out);
    pthread_mutex_unlock(&lock);
    if (found) return OK;
    if (now_ns() >= deadline) return TIMEOUT;
    usleep(cap ? 20000 : 100000); /* a driver sleeps in the kernel: benchmarks should not see this one look */
  }
}
