{{- define "kvstore.fullname" -}}
{{- if contains "kvstore" .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-kvstore" (.Release.Name | trunc 44 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "kvstore.selector" -}}
app.kubernetes.io/name: kvstore
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "kvstore.labels" -}}
{{ include "kvstore.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "kvstore.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (.Values.serviceAccount.create | ternary (include "kvstore.fullname" .) "default") -}}
{{- end -}}

{{- define "kvstore.isShared" -}}
{{- if eq .Values.kind "StatefulSet" }}true{{ end -}}
{{- end -}}

{{- define "kvstore.image" -}}
{{- $repository := required "image.repository: name the image that deploy/image builds, in a registry of yours" .Values.image.repository -}}
{{- $tag := .Values.image.tag | default .Chart.AppVersion -}}
{{- printf "%s%s%s" $repository (hasPrefix "sha256:" $tag | ternary "@" ":") $tag -}}
{{- end -}}

{{/* Memory of the container in MiB: the pool, its index and page tables, and the process. */}}
{{- define "kvstore.memory" -}}
{{- $pool := mulf .Values.memoryGib 1024 -}}
{{- $share := divf (mulf $pool .Values.overhead.percent) 100 -}}
{{- printf "%dMi" (addf $pool $share .Values.overhead.baseMib | ceil | int64) -}}
{{- end -}}

{{/* Folder of the sockets. Of a StatefulSet only operators use it, by kubectl exec: the server makes it in an emptyDir. */}}
{{- define "kvstore.sockets" -}}
{{- if include "kvstore.isShared" . }}/run/kvstore/operator{{ else }}{{ .Values.socketFolder }}{{ end -}}
{{- end -}}

{{/* The chart's own keys of the configuration, as YAML. */}}
{{- define "kvstore.ownKeys" -}}
server_listen: {{ printf "kvs+ipc://%s%s" (include "kvstore.sockets" .) (eq .Values.kind "StatefulSet" | ternary (printf ", kvs://0.0.0.0:%d" (int64 .Values.tcp.port)) "" ) | quote }}
max_local_cpu_size: {{ .Values.memoryGib | toJson }}
{{- if .Values.disk.enabled }}
local_disk: /mnt/kvstore/chunks
max_local_disk_size: {{ .Values.disk.sizeGib | toJson }}
{{- end }}
server_drain_secs: {{ .Values.drainSeconds | toJson }}
server_http_host: "0.0.0.0"
server_http_port: {{ int64 .Values.http.port }}
{{- if .Values.http.tokenSecret }}
server_http_token_file: /run/secrets/kvstore/token
{{- end }}
{{- if include "kvstore.isShared" . }}
server_key_file: /run/secrets/kvstore/server.key
server_clients: /etc/kvstore/clients
{{- with .Values.tcp.operators }}
server_operators: {{ join ", " . | quote }}
{{- end }}
{{- end }}
{{- with .Values.logLevel }}
server_log_level: {{ . }}
{{- end }}
{{- with .Values.quotas }}
server_quotas: {{ include "kvstore.quotas" . | quote }}
{{- end }}
{{- end -}}

{{- define "kvstore.quotas" -}}
{{- $parts := list -}}
{{- range $name, $gib := . -}}
{{- $parts = append $parts (printf "%s=%s" $name (toString $gib)) -}}
{{- end -}}
{{- join ", " $parts -}}
{{- end -}}

{{/* The whole configuration: the chart's keys, and those of `config`, which may not be the same. */}}
{{- define "kvstore.config" -}}
{{- $own := include "kvstore.ownKeys" . | fromYaml -}}
{{- range $key, $_ := .Values.config -}}
{{- if hasKey $own $key -}}
{{- fail (printf "config.%s: the chart sets this key from other values" $key) -}}
{{- end -}}
{{- end -}}
{{- include "kvstore.ownKeys" . -}}
{{- with .Values.config }}
{{ toYaml . }}
{{- end -}}
{{- end -}}

{{- define "kvstore.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}
