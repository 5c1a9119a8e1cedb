/* A stand-in for libcuda.so.1 and libcupti.so.13: the calls that opusmon makes, with the vendor's structures.
 *
 * What it answers is read from the file named in CUPTI_STUB at each call, one "key value" per line:
 *   devices N, driver 13000, version 130001, chip GH100
 *   fail.FUNCTION CODE [TIMES]    that function answers CODE, the first TIMES times (0: always)
 *   crash.FUNCTION 1              that function kills the process
 *   rate.METRIC X                 a .sum metric grows by X a second; another has the value X
 *   passes.METRIC N               a configuration with that metric needs N passes
 *   unknown.METRIC 1              that metric cannot be configured (999)
 *   nan_first 1                   the first sample after a start holds NaN
 *   overflow 1                    every decode says that samples were lost
 */
#define _GNU_SOURCE
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct { size_t size; void *priv; } head_t;

static double setting(const char *key, const char *name, double otherwise, double *second)
{
    char wanted[256], line[512], found[256];
    double value = otherwise, a, b;
    const char *path = getenv("CUPTI_STUB");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file)
        return otherwise;
    snprintf(wanted, sizeof(wanted), "%s%s", key, name);
    while (fgets(line, sizeof(line), file)) {
        b = 0;
        if (sscanf(line, "%255s %lf %lf", found, &a, &b) >= 2 && !strcmp(found, wanted)) {
            value = a;
            if (second)
                *second = b;
        }
    }
    fclose(file);
    return value;
}

#define MAX_NAMES 64
static struct { char name[128]; int count; } calls[MAX_NAMES];

static int begin(const char *name, head_t *head, size_t size)
{
    double times = 0;
    int n = 0, code = (int)setting("fail.", name, 0, &times);
    while (n < MAX_NAMES - 1 && calls[n].name[0] && strcmp(calls[n].name, name))
        n++;
    snprintf(calls[n].name, sizeof(calls[n].name), "%s", name);
    calls[n].count++;
    if (setting("crash.", name, 0, NULL))
        abort();
    if (head && head->size != size)
        return 10; /* PARAMETER_SIZE_NOT_SUFFICIENT */
    return code && (times == 0 || calls[n].count <= times) ? code : 0;
}

int cuInit(unsigned flags) { (void)flags; return begin("cuInit", NULL, 0); }
int cuDriverGetVersion(int *v) { *v = (int)setting("driver", "", 13000, NULL); return begin("cuDriverGetVersion", NULL, 0); }
int cuDeviceGetCount(int *n) { *n = (int)setting("devices", "", 1, NULL); return begin("cuDeviceGetCount", NULL, 0); }

int cuptiGetVersion(uint32_t *v) { *v = (uint32_t)setting("version", "", 130001, NULL); return 0; }
int cuptiGetResultString(int code, const char **words)
{
    static char text[64];
    snprintf(text, sizeof(text), "CUPTI_ERROR_NUMBER_%d", code);
    *words = text;
    return 0;
}

#define BEGIN(name, bytes) do { int code_ = begin(name, &p->h, bytes); if (code_) return code_; } while (0)

struct nothing { head_t h; };
int cuptiProfilerInitialize(struct nothing *p) { BEGIN("cuptiProfilerInitialize", 16); return 0; }

struct chip { head_t h; size_t device; const char *name; };
int cuptiDeviceGetChipName(struct chip *p) { BEGIN("cuptiDeviceGetChipName", 32); p->name = "GH100"; return 0; }

struct avail { head_t h; size_t device, size; uint8_t *image; };
static int enabled;
int cuptiPmSamplingGetCounterAvailability(struct avail *p)
{
    BEGIN("cuptiPmSamplingGetCounterAvailability", 40);
    if (enabled)
        return 999; /* as the real one does */
    if (p->image)
        memset(p->image, 1, p->size);
    else
        p->size = 64;
    return 0;
}

#define MAX_METRICS 32
struct host { int count; char names[MAX_METRICS][128]; };
struct host_init { head_t h; int type, pad; const char *chip; const uint8_t *image; struct host *host; };
int cuptiProfilerHostInitialize(struct host_init *p)
{
    BEGIN("cuptiProfilerHostInitialize", 48);
    if (p->type != 1 || !p->image || strcmp(p->chip, "GH100"))
        return 46;
    p->host = calloc(1, sizeof(struct host));
    return 0;
}

struct host_end { head_t h; struct host *host; };
int cuptiProfilerHostDeinitialize(struct host_end *p) { BEGIN("cuptiProfilerHostDeinitialize", 24); free(p->host); return 0; }

struct base { head_t h; struct host *host; int kind; const char **names; size_t count; };
int cuptiProfilerHostGetBaseMetrics(struct base *p) { BEGIN("cuptiProfilerHostGetBaseMetrics", 48); p->count = 0; return 0; }

struct add { head_t h; struct host *host; const char **names; size_t count; };
int cuptiProfilerHostConfigAddMetrics(struct add *p)
{
    BEGIN("cuptiProfilerHostConfigAddMetrics", 40);
    for (size_t n = 0; n < p->count && p->host->count < MAX_METRICS; n++) {
        if (setting("unknown.", p->names[n], 0, NULL))
            return 999;
        snprintf(p->host->names[p->host->count++], 128, "%s", p->names[n]);
    }
    return 0;
}

struct image_size { head_t h; struct host *host; size_t size; };
int cuptiProfilerHostGetConfigImageSize(struct image_size *p)
{
    BEGIN("cuptiProfilerHostGetConfigImageSize", 32);
    p->size = sizeof(struct host);
    return 0;
}

struct image { head_t h; struct host *host; size_t size; uint8_t *config; };
int cuptiProfilerHostGetConfigImage(struct image *p)
{
    BEGIN("cuptiProfilerHostGetConfigImage", 40);
    memcpy(p->config, p->host, sizeof(struct host));
    return 0;
}

struct passes { head_t h; size_t size; uint8_t *config; size_t passes; };
int cuptiProfilerHostGetNumOfPasses(struct passes *p)
{
    BEGIN("cuptiProfilerHostGetNumOfPasses", 40);
    struct host *host = (struct host *)p->config;
    p->passes = 1;
    for (int n = 0; n < host->count; n++) {
        double needed = setting("passes.", host->names[n], 1, NULL);
        if (needed > (double)p->passes)
            p->passes = (size_t)needed;
    }
    return 0;
}

#define MAX_SAMPLES 4096
struct sampler { int device; uint64_t interval, begun, decoded; int fresh, running, ready; };
struct data { uint32_t magic, room, count; int first; uint64_t start[MAX_SAMPLES], end[MAX_SAMPLES]; };

static uint64_t wall(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

struct enable { head_t h; size_t device; struct sampler *sampler; };
int cuptiPmSamplingEnable(struct enable *p)
{
    BEGIN("cuptiPmSamplingEnable", 32);
    p->sampler = calloc(1, sizeof(struct sampler));
    p->sampler->device = (int)p->device;
    enabled++;
    return 0;
}

struct on { head_t h; struct sampler *sampler; };
int cuptiPmSamplingDisable(struct on *p) { BEGIN("cuptiPmSamplingDisable", 24); free(p->sampler); enabled--; return 0; }
int cuptiPmSamplingStart(struct on *p)
{
    BEGIN("cuptiPmSamplingStart", 24);
    if (!p->sampler->ready)
        return 999;
    p->sampler->begun = p->sampler->decoded = wall();
    p->sampler->fresh = p->sampler->running = 1;
    return 0;
}
int cuptiPmSamplingStop(struct on *p) { BEGIN("cuptiPmSamplingStop", 24); p->sampler->running = p->sampler->ready = 0; return 0; }

struct config { head_t h; struct sampler *sampler; size_t size; const uint8_t *config; size_t buffer; uint64_t interval; int trigger, append; };
int cuptiPmSamplingSetConfig(struct config *p)
{
    BEGIN("cuptiPmSamplingSetConfig", 64);
    if (p->trigger != 1 || p->append != 1 || !p->config)
        return 1;
    if (p->interval != 1000000)
        return 999; /* others do not start on a busy GPU */
    p->sampler->interval = p->interval;
    p->sampler->ready = 1;
    return 0;
}

struct data_size { head_t h; struct sampler *sampler; const char **names; size_t count; uint32_t room; size_t size; };
int cuptiPmSamplingGetCounterDataSize(struct data_size *p)
{
    BEGIN("cuptiPmSamplingGetCounterDataSize", 56);
    p->size = sizeof(struct data);
    return 0;
}

struct data_init { head_t h; struct sampler *sampler; size_t size; struct data *data; };
int cuptiPmSamplingCounterDataImageInitialize(struct data_init *p)
{
    BEGIN("cuptiPmSamplingCounterDataImageInitialize", 40);
    p->data->magic = 0x0b0e;
    p->data->count = 0;
    return 0;
}

struct decode { head_t h; struct sampler *sampler; struct data *data; size_t size; int reason; uint8_t overflow; };
int cuptiPmSamplingDecodeData(struct decode *p)
{
    BEGIN("cuptiPmSamplingDecodeData", 45);
    struct sampler *s = p->sampler;
    if (p->data->magic != 0x0b0e)
        return 1;
    if (s->running)
        return 0; /* a busy GPU's samples are still on their way: none is complete */
    p->data->first = s->fresh;
    uint64_t at = s->decoded, now = wall();
    while (at + s->interval <= now && p->data->count < MAX_SAMPLES) {
        uint64_t end = at + s->interval * (s->fresh ? 2 : 1); /* the first one is longer */
        if (end > now)
            break;
        p->data->start[p->data->count] = at;
        p->data->end[p->data->count++] = end;
        s->fresh = 0;
        at = end;
    }
    s->decoded = at;
    p->overflow = (uint8_t)setting("overflow", "", 0, NULL);
    return 0;
}

struct count { head_t h; const struct data *data; size_t size, total, populated, completed; };
int cuptiPmSamplingGetCounterDataInfo(struct count *p)
{
    BEGIN("cuptiPmSamplingGetCounterDataInfo", 56);
    p->completed = p->populated = p->data->count;
    p->total = MAX_SAMPLES;
    return 0;
}

struct times { head_t h; struct sampler *sampler; const struct data *data; size_t size, sample; uint64_t start, end; };
int cuptiPmSamplingCounterDataGetSampleInfo(struct times *p)
{
    BEGIN("cuptiPmSamplingCounterDataGetSampleInfo", 64);
    p->start = p->data->start[p->sample];
    p->end = p->data->end[p->sample];
    return 0;
}

struct eval { head_t h; struct host *host; const struct data *data; size_t size, sample; const char **names; size_t count; double *values; };
int cuptiProfilerHostEvaluateToGpuValues(struct eval *p)
{
    BEGIN("cuptiProfilerHostEvaluateToGpuValues", 72);
    double seconds = (double)(p->data->end[p->sample] - p->data->start[p->sample]) / 1e9;
    for (size_t n = 0; n < p->count; n++) {
        const char *name = p->names[n];
        double rate = setting("rate.", name, 0, NULL);
        p->values[n] = strstr(name, ".sum") ? rate * seconds : rate;
        if (p->data->first && p->sample == 0)
            p->values[n] = setting("nan_first", "", 0, NULL) ? NAN : p->values[n] * 1000;
    }
    return 0;
}
